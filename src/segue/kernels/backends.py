"""Which backend computes attention.

`torch` gathers K and V (or reads them in place, on a CPU) and runs everywhere; `cpu` is compiled code for one;
`triton` reads them where they lie, with
this house's own kernels; `flex` has torch compile them, for a GPU; `flashinfer` and `flash_attn` are the libraries of
these names, where they are installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from segue.kernels.native import library
from segue.kernels.native_attention import NativeAttention
from segue.kernels.paged_step import AttentionBackend
from segue.messages.errors import ConfigError


def attention_backend(name: str, device: torch.device, block_size: int) -> AttentionBackend | None:
    """None: `torch`. `auto`: `triton` on a GPU where it is installed, `cpu` on one, where it was compiled. Raises
    `ConfigError` for one that is not."""
    if name == "auto":
        name = _best(device)
    if name == "torch":
        return None
    if name == "cpu":
        return _compiled(device)
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
    if name == "flex":
        from segue.kernels.flex_backend import FlexAttention, compiled

        _check_blocks(name, block_size, FlexAttention.page)
        return FlexAttention(compiled())
    from segue.kernels.flash_attn_backend import FlashAttention

    _check_blocks(name, block_size, FlashAttention.page)
    return FlashAttention()


def _check_blocks(name: str, block_size: int, page: int) -> None:
    if block_size % page:
        raise ConfigError(
            f"attention is {name!r} with a block_size of {block_size}; it must be a multiple of {page}",
            field="block_size",
        )


def _best(device: torch.device) -> str:
    if device.type == "cuda":
        return "triton" if find_spec("triton") is not None else "torch"
    return "cpu" if device.type == "cpu" and library() is not None else "torch"


def _compiled(device: torch.device) -> AttentionBackend:
    compiled = library()
    if compiled is None or device.type != "cpu":
        raise ConfigError(
            f"attention is 'cpu', which needs an x86-64 CPU with AVX2, and a C compiler when segue is installed; "
            f"this stage runs on {device}",
            field="attention",
        )
    return NativeAttention(compiled)
