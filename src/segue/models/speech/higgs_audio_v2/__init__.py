"""Higgs Audio v2 (Boson AI): a language model that says a text in delayed codebooks, and the decoder of its codec. Read
`graph`, then `stages`.

Doors: `family`.
"""
