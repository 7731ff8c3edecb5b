"""transformers can be imported beside a torchvision whose operators do not load."""

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()
