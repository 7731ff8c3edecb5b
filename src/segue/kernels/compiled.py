"""`torch.compile` for the layers of a decoder: fewer and larger kernels around the linear layers and attention.

A decoder is a list of equal layers, so one layer is compiled (in pieces: attention stays as it is, because what it
reads changes with every step) and its code serves all. Batch sizes are symbols, so there are two versions: one token,
and several. Compiled code is kept on disk between starts, where torch keeps it (`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

_log = logging.getLogger("segue.compile")


def compile_layers(decoder: nn.Module, device: str) -> int:
    """Have the repeated layers of `decoder` compiled at their next call; returns how many there are.

    0, with a line in the log, where there are none, or no C++ compiler for a CPU.
    """
    if not _ready(device):
        return 0
    layers = repeated_layers(decoder)
    if not layers:
        _log.warning("compile: %s has no list of equal layers; running uncompiled", type(decoder).__name__)
        return 0
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def compile_forwards(blocks: Sequence[nn.Module], device: str, apart: Iterable[nn.Module] = ()) -> int:
    """Have the `forward` of every block compiled at its next call: what is later put around it (hooks) stays outside.
    Numbers of rows and tokens are symbols. `apart`: modules inside the blocks that run as they are, between pieces of
    compiled code. Returns how many blocks there are; 0, with a line in the log, without a compiler.
    """
    if not _ready(device):
        return 0
    for module in apart:
        module.forward = torch.compiler.disable(module.forward)
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)
    return len(blocks)


def _ready(device: str) -> bool:
    if device == "cpu" and _compiler() is None:
        _log.warning("compile: no C++ compiler (CXX, g++ or clang++) is there; running uncompiled")
        return False
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache()))
    return True


def repeated_layers(decoder: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class in `decoder`, none of which is a leaf."""
    lists = [list(child) for child in decoder.modules() if isinstance(child, nn.ModuleList)]
    equal = [
        layers
        for layers in lists
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1 and any(layers[0].children())
    ]
    return max(equal, key=len, default=[])


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segue" / "inductor"
