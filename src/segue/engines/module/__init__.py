"""The engine of one-shot networks: encoders, decoders, vocoders and the input stage's processors, in batched calls.

Doors: `engine`, `contract`.
"""
