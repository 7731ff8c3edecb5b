"""Serves any language model of `transformers` with image, video or audio inputs: encoder, then language model. Read
`graph`, then `stages`.

Doors: `family`.
"""
