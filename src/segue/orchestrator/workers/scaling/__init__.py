"""How many workers a stage has: `moves` gives a worker to another stage, by command or by `move_policy`, and adds and
removes workers by `scale_policy`; `crews` describes them to the policies, a `crew` per stage.

Optional reading: the supervisor asks `Moves` from time to time whether to change the workers of a stage.

Doors: `moves`.
"""
