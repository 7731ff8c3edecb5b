"""Per-sequence device memory: KV blocks with prefix caching (`blocks`), recurrent states (`states`), and the number of
each that fits a byte budget (`memory`).

Doors: `blocks`, `memory`, `states`.
"""
