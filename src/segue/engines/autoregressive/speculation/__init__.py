"""Speculative decoding. `speculation` is the engine's interface, `drafter` the protocol of drafters, `worth` decides
whether drafts pay off, and the other modules implement drafters.

Doors: `speculation`, `contract`, `drafter`, `cache`, `heads`, `model`, `ngram`.
"""
