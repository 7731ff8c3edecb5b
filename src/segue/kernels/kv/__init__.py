"""Per-sequence device memory of a decoder: paged keys and values (`store`, arranged by `layout`) and recurrent states
(`states`, passed to mixers of `transformers` through `state_cache`).

Doors: `layout`, `state_cache`, `states`, `store`.
"""
