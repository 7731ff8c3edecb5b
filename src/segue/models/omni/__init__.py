"""Families that read several modalities: `qwen2_5_omni` and `qwen3_omni`, which also speak, `bagel`, which also draws,
and `multimodal_lm`, any language model of `transformers` that sees or hears.

Doors: the `family` of each, `bagel`.
"""
