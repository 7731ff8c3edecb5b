"""A worker runs one replica of a stage, or of several fused stages: `worker` is its loop from inbox to engines to
outbox, `build` makes it from its spec, and `forkserver` starts it. Only workers touch connectors. Workers are
processes (`python -m segue.worker`).

Doors: none.
"""
