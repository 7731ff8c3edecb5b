"""Kernels and their callers. `prepare` packs, quantises and joins the layers of a network as far as its device can,
`operations` are single ones; `attention` runs over a paged KV store (`kv`); `linear` and `conv` have layers, `graphs`
replays calls. `cpu` has CPU-specific code, which only other kernels see, through `cpu_kernels`. Each has a plain torch
counterpart that runs anywhere.

Doors: `prepare`, `operations`, `attention`, `kv`, `linear`, `conv`, `graphs`, `cpu_kernels`, `device`, `staging`,
`top_p`, `torchvision_shim`.
"""

from segue.kernels.torchvision_shim import ensure_torchvision

# this is the lowest package that imports transformers, which fails if torchvision's extension does not load
ensure_torchvision()
