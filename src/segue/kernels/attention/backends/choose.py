"""Chooses the backend that computes attention.

`torch` gathers K and V (or reads them in place, on a CPU) and runs everywhere. `cpu` is compiled code for CPUs.
`triton` reads K and V in place with Segue's own kernels. `flex` compiles GPU kernels with torch. `flashinfer` and
`flash_attn` are the libraries of these names, if they are installed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec

import torch

from segue.kernels.attention.paged_step import AttentionBackend
from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.graphs.compiled import lacks_for_triton
from segue.messages.errors import ConfigError

_log = logging.getLogger(__name__)


def attention_backend(
    name: str, device: torch.device, block_size: int, environment: Mapping[str, str] = os.environ
) -> AttentionBackend | None:
    """Build the backend `name`; None: `torch`. `auto`: `triton` on a GPU if it is installed and its build tools are
    found, `cpu` on a CPU if it was compiled. `environment`: where to look for a C compiler. Raises `ConfigError` for an
    unavailable backend."""
    if name == "auto":
        name = _best(device, environment)
    if name == "torch":
        return None
    if name == "cpu":
        return _compiled(device)
    if name != "flex" and find_spec(name) is None:
        raise ConfigError(f"attention is {name!r}, but the package {name} is not installed", field="attention")
    if name in ("triton", "flex") and device.type == "cuda" and (missing := lacks_for_triton(environment)):
        raise ConfigError(
            f"attention is {name!r}, which compiles code at run time, but {missing} is missing; install it, or set "
            "attention to 'torch'",
            field="attention",
        )
    if name == "triton":
        from segue.kernels.attention.backends.triton import TritonAttention

        return TritonAttention(device)
    if device.type != "cuda":
        raise ConfigError(f"attention is {name!r}, which needs a GPU; this stage runs on {device}", field="attention")
    if name == "flashinfer":
        from segue.kernels.attention.backends.flashinfer import FlashInferAttention

        return FlashInferAttention(device)
    if name == "flex":
        from segue.kernels.attention.backends.flex import FlexAttention, compiled

        _check_blocks(name, block_size, FlexAttention.page)
        return FlexAttention(compiled())
    from segue.kernels.attention.backends.flash_attn import FlashAttention

    _check_blocks(name, block_size, FlashAttention.page)
    return FlashAttention()


def records_while_serving(backend: AttentionBackend | None) -> bool:
    """Whether decode steps over this backend are recorded at their own size, the first at warm-up, others while
    serving: on a CPU with compiled kernels. Other backends' steps are padded to sizes that are captured at the start.
    """
    compiled = cpu_kernels()
    return compiled is not None and isinstance(backend, compiled.Attention)


def _check_blocks(name: str, block_size: int, page: int) -> None:
    if block_size % page:
        raise ConfigError(
            f"attention is {name!r} with a block_size of {block_size}; it must be a multiple of {page}",
            field="block_size",
        )


def _best(device: torch.device, environment: Mapping[str, str]) -> str:
    if device.type == "cuda":
        missing = "the package triton" if find_spec("triton") is None else lacks_for_triton(environment)
        if missing is None:
            return "triton"
        _log.warning("attention runs on torch, which is slower than triton: %s is missing", missing)
        return "torch"
    return "cpu" if device.type == "cpu" and cpu_kernels() is not None else "torch"


def _compiled(device: torch.device) -> AttentionBackend:
    compiled = cpu_kernels()
    if compiled is None or device.type != "cpu":
        raise ConfigError(
            f"attention is 'cpu', which needs an x86-64 CPU with AVX2, and a C compiler when segue is installed; "
            f"this stage runs on {device}",
            field="attention",
        )
    return compiled.attention()
