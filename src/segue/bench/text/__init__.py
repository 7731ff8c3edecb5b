"""`segue bench text`: completions of a language model, compared with `transformers` and with a server such as vLLM.

Doors: `arguments`, `report`, `results`.
"""
