"""A worker runs one replica of a stage, or of several fused stages: `worker` is its loop from inbox to engines to
outbox, `build` makes it from its spec, `stage` is a stage with its requests, `deltas` what clients get of an output.
`edges` moves payloads and messages between workers, `process` starts and ends workers (`python -m segue.worker`),
`kinds` builds the engine of each kind. Only workers touch connectors.

Doors: none.
"""
