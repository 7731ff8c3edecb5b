"""Serves text embedding models in the format of sentence-transformers as one stage.

Doors: `family`.
"""
