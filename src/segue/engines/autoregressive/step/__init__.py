"""One step on the device. `dispatch` builds the flat batch (`inputs`) and starts it, from a captured graph if possible
(`decode_graphs`); `advance` completes rows of codes; `complete` reads back the drawn tokens and makes the outputs.
`active` holds the sequences of an engine. Before the first step, `resources` allocates, `check` compares a flat batch
with single sequences, and `warm_up` runs the first shapes. `invariant` makes results independent of the batch.

Doors: `active`, `complete`, `dispatch`, `invariant`, `resources`.
"""
