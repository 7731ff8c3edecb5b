"""Serves any causal language model of `transformers` as one stage.

Doors: `family`, `shapes`, `tiny`.
"""
