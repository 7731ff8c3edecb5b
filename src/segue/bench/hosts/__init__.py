"""`segue bench hosts`: what it costs to leave one machine. `hops` measures payloads on their way to another process, of
which `consumer` is the program; `serving` has a model over two hosts; `limit` is the program that measures the
orchestrator, with the workers of `simulated`; `scale` reckons from the results.

Doors: `arguments`, `results`, `scale`.
"""
