"""The workers, as the orchestrator sees them: `placement` starts their processes, `nodes` also those of hosts that have
joined, each with an `agent`; `supervisor` replaces those that die or hang (`hangs`), `replicas` has their states,
`outgoing` the sockets to them. `router` chooses one for each request by the rules of `routing`, with what `affinity`
remembers; `moves` gives a worker to another stage, by command or by `move_policy`, and adds and removes
workers by `scale_policy`, from what `crews` says of them.

Doors: `agent`, `placement`, `replicas`, `router`, `supervisor`.
"""
