"""Speculative decoding. `speculation` is the engine's interface, `drafter` the protocol of drafters, `worth` decides
whether drafts pay off, and the other modules implement drafters.

Optional reading: before a step the engine asks `Speculation` for drafts; after it, `accepted` says how many of them
stay.

Doors: `speculation`, `contract`, `drafter`, `cache`, `heads`, `model`, `ngram`.
"""
