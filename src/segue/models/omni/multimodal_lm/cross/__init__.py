"""Decoders with cross-attention to images (Llama 3.2 Vision).

Doors: `llm`.
"""
