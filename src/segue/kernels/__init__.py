"""Kernels and their callers: `attention` over a paged KV store (`kv`), `linear` layers, `conv`, replayed calls
(`graphs`) and CPU-specific code (`cpu`). Each has a plain torch counterpart that runs anywhere.

Doors: `attention`, `kv`, `linear`, `conv`, `graphs`, `cpu`, `device`, `staging`, `top_p`, `torchvision_shim`.
"""

from segue.kernels.torchvision_shim import ensure_torchvision

# this is the lowest package that imports transformers, which fails if torchvision's extension does not load
ensure_torchvision()
