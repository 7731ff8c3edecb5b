"""How many workers a stage has: `moves` gives a worker to another stage, by command or by `move_policy`, and adds and
removes workers by `scale_policy`, from what `crews` says of them.

Doors: `moves`.
"""
