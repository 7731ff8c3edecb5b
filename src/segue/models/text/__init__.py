"""Families for text inputs: `causal_lm` (any language model of `transformers`) generates text; `text_embedding`,
`text_classification` and `cross_encoder` return numbers.

Doors: the `family` of each, `causal_lm.shapes`, `causal_lm.tiny`.
"""
