"""Attention over a paged KV store. `paged_attention` is the attention function that `transformers` models call,
`paged_step` its metadata of a step, `backends` has the kernels, and `interface` holds the types that all share.

Doors: `backends`, `calls`, `cross_attention`, `encoder_attention`, `gathered_cache`, `interface`,
`invariant_attention`, `paged_attention`, `paged_step`, `prefix_attention`.
"""
