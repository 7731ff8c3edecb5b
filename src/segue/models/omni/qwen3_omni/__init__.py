"""Qwen3-Omni: encoder and thinker, a mixture of experts. Read `graph`, then `stages`.

Doors: `family`.
"""
