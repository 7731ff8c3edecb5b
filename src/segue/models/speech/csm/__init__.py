"""CSM (Sesame): a backbone with a depth decoder that speaks a text, and the Mimi codec. Read `graph`, then `stages`.

Doors: `family`.
"""
