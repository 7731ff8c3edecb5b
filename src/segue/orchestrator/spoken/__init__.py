"""Say a text while it arrives: `words` and `sentences` cut it, `passages` has each part said by a generation, in turn.

Doors: `passages`, `sentences`, `words`.
"""
