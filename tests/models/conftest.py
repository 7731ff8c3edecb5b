"""Mends torchvision before any test of this folder imports transformers."""

from __future__ import annotations

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()
