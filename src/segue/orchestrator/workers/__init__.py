"""The workers, as the orchestrator sees them: `placement` starts their processes, `nodes` also those of hosts that have
joined; `supervisor` replaces those that die or hang (`hangs`), `replicas` has their states, `outgoing` the sockets to
them. `router` chooses one for each request by the rules of `routing`, with what `affinity` remembers; `scaling` gives a
worker to another stage, and adds and removes workers; `lora_adapters` loads and unloads adapters on all of them, and
`versions` says whether the hosts run the same code.

Doors: `nodes`, `placement`, `replicas`, `router`, `supervisor`.
"""
