"""vLLM's extensions of OpenAI's API: tokenize, pooling, scores, LoRA adapters, and its clients' parameters.

Doors: `lora`, `omni`, `parameters`, `pooling`, `scores`, `tokenize`.
"""
