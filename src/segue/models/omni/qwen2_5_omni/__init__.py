"""Qwen2.5-Omni: encoder, thinker, talker and vocoder. Read `graph`, then `stages`.

Doors: `family`.
"""
