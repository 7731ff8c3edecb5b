"""The engine of denoisers: one step is one call of the network over rows of many requests, each at its own timestep.
`engine` is the loop, `contract` the interface to a model, `batch` chooses the samples of a step, and `memory` computes
how many rows fit. `sharing` divides a call between the ranks of a replica; `step_caches` skips calls for requests that
allow it.

Doors: `contract`, `engine`, `sharing`.
"""
