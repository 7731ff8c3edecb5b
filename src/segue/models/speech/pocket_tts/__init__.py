"""Pocket TTS (Kyutai): a backbone with a flow head that speaks a text in continuous latents, and its audio tokenizer's
decoder. Read `graph`, then `stages`.

Doors: `family`.
"""
