"""Decides which sequences compute how many tokens in the next step. `schedule` decides and changes nothing, with
`admission` for waiting sequences; `scheduler` applies the decision to queues and blocks. `decision` has the types of
these, `message` the form of a decision for other ranks, `policies` the order of requests, and `bidirectional` the spans
of a prompt that a step must not split.

Doors: `decision`, `message`, `policies`, `scheduler`, `bidirectional`.
"""
