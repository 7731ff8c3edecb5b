"""Attention backends, the KV store, packed products: each beside a plain torch reference that runs on a CPU."""

from segue.kernels.torchvision_shim import ensure_torchvision

# this is the lowest room that imports transformers, which fails where torchvision's extension does not load
ensure_torchvision()
