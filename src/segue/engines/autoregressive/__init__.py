"""The engine of language models: continuous batching over a paged KV cache. Read `engine` first: `step` schedules,
dispatches and completes. `contract` is the interface to a model, `output` what a step returns, `config` what a
deployment sets, `sequence` one request's state, `hold` its input if that comes in pieces. `schedule` decides which
sequences compute how many tokens, `cache` owns the blocks, `step` runs a decision on the device, `sample` draws tokens.
Optional parts have packages of their own: `branches` (parallel sampling and beams), `grammar` (structured output),
`speculation` (draft tokens), `contexts` (what a denoiser reads).

Doors: `engine`, `contract`, `output`, `config`, `cache.memory`, `step.invariant`, `grammar`, `speculation`, `contexts`.
"""
