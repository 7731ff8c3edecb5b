"""The autoregressive kind in a worker: `kind` builds the engine, `cache_size` computes how much its caches hold, and
`drafters` loads what speculation needs.

Doors: none.
"""
