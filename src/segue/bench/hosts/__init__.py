"""`segue bench hosts`: what it costs to leave one machine. `hops` measures payloads on their way to another process,
and `hosts` a model over two hosts; `limit` is the program that measures the orchestrator, with the workers of
`simulated`; `results` has the tables, and what they mean for more workers and hosts (`docs/scale.md`).

Doors: `arguments`, `results`.
"""
