"""The denoiser stage: its stage model for the diffusion engine (`denoiser`), a request's inputs (`given`), schedulers,
compilation and quantisation (`tuning`), step caches, LoRA, parallelism.

Doors: `denoiser`, `given`, `schedulers`, `sequence_parallel`, `teacache`, `tuning`.
"""
