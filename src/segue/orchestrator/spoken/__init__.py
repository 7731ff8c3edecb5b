"""Say a text while it arrives: `words` and `sentences` cut it, `passages` has each part said by a generation, in turn.

Optional reading: only for text that is said while it arrives.

Doors: `passages`, `sentences`, `words`.
"""
