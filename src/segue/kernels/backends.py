"""Which backend computes attention.

`torch` gathers K and V (or reads them in place, on a CPU) and runs everywhere; `triton` reads them where they lie, with
this house's own kernels; `flashinfer` and `flash_attn` are the libraries of these names, where they are installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from segue.kernels.paged_step import AttentionBackend
from segue.messages.errors import ConfigError

_PAGE = 256
"""FlashAttention 2 reads blocks of a multiple of so many tokens."""


def attention_backend(name: str, device: torch.device, block_size: int) -> AttentionBackend | None:
    """None: `torch`. `auto`: `triton` on a GPU where it is installed. Raises `ConfigError` for one that is not."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"
    if name == "torch":
        return None
    if find_spec(name) is None:
        raise ConfigError(f"attention is {name!r}, but the package {name} is not installed", field="attention")
    if name == "triton":
        from segue.kernels.triton_backend import TritonAttention

        return TritonAttention(device)
    if device.type != "cuda":
        raise ConfigError(f"attention is {name!r}, which needs a GPU; this stage runs on {device}", field="attention")
    if name == "flashinfer":
        from segue.kernels.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(device)
    if block_size % _PAGE:
        raise ConfigError(
            f"attention is 'flash_attn' with a block_size of {block_size}; it must be a multiple of {_PAGE}",
            field="block_size",
        )
    from segue.kernels.flash_attn_backend import FlashAttention

    return FlashAttention()
