"""Which backend computes attention.

`torch` gathers K and V (or reads them in place, on a CPU) and runs everywhere; `triton` reads them where they lie, with
this house's own kernels; `flex` has torch compile them, for a GPU; `flashinfer` and `flash_attn` are the libraries of
these names, where they are installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from segue.kernels.paged_step import AttentionBackend
from segue.messages.errors import ConfigError

_PAGE = 256
"""FlashAttention 2 reads blocks of a multiple of so many tokens."""
_TILE = 128
"""FlexAttention's kernels read up to so many tokens at once, all of one block."""


def attention_backend(name: str, device: torch.device, block_size: int) -> AttentionBackend | None:
    """None: `torch`. `auto`: `triton` on a GPU where it is installed. Raises `ConfigError` for one that is not."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"
    if name == "torch":
        return None
    if name != "flex" and find_spec(name) is None:
        raise ConfigError(f"attention is {name!r}, but the package {name} is not installed", field="attention")
    if name == "triton":
        from segue.kernels.triton_backend import TritonAttention

        return TritonAttention(device)
    if device.type != "cuda":
        raise ConfigError(f"attention is {name!r}, which needs a GPU; this stage runs on {device}", field="attention")
    if name == "flashinfer":
        from segue.kernels.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(device)
    page = _TILE if name == "flex" else _PAGE
    if block_size % page:
        raise ConfigError(
            f"attention is {name!r} with a block_size of {block_size}; it must be a multiple of {page}",
            field="block_size",
        )
    if name == "flex":
        from segue.kernels.flex_backend import FlexAttention, compiled

        return FlexAttention(compiled())
    from segue.kernels.flash_attn_backend import FlashAttention

    return FlashAttention()
