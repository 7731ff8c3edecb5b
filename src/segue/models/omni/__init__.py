"""Families that read several modalities: `qwen2_5_omni`, which also speaks, `qwen3_omni`, and `multimodal_lm`, any
language model of `transformers` that sees or hears.

Doors: the `family` of each, `qwen2_5_omni.tiny.presets`.
"""
