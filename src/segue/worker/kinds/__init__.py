"""Engine kinds, the half with torch: one module per kind with the contract of its stage models, what they are built
from, and how its engine is built from a stage model (`kind.WorkerKind`). The half without torch is in
`segue.graph.kinds`; it names these modules by text, and `kind.worker_kind` imports them.

Doors: `kind`.
"""
