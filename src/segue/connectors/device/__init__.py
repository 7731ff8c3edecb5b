"""Memory of an accelerator that another process can open: `memory` is the interface to it, `cuda` implements it for
CUDA devices, `memfd` with host memory, for machines without one. `staging` copies tensors from a CUDA
device to the host in chunks.

Optional reading: memory of a GPU, by the contract of any connector.

Doors: `cuda`, `memory`, `staging`.
"""
