"""`torch.compile` for the layers of a decoder, for fewer and larger kernels around the linear layers and attention; and
a check that Triton can build its launch code.

A decoder is a list of equal layers, so one layer is compiled (in pieces: attention stays uncompiled, because its inputs
change with every step) and its code serves all. Batch sizes are symbols, so there are two versions: one token, and
several. Compiled code is cached on disk between starts by torch (`TORCHINDUCTOR_CACHE_DIR`)."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from segue.kernels.graphs.cuda_capture import one_call


def lacks_for_triton(environment: Mapping[str, str] = os.environ, headers: Path | None = None) -> str | None:
    """Describe what Triton lacks to build, at run time, the C modules that launch its kernels; None: nothing. Searches
    like `triton.runtime.build`. `headers`: the directory of Python's headers, if not the usual one."""
    path = environment.get("PATH", os.defpath)
    named = environment.get("CC")
    if named is not None:
        if shutil.which(named, path=path) is None:
            return f"the C compiler that CC names, {named!r}"
    elif not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return "a C compiler (gcc or clang)"
    if not ((headers or Path(sysconfig.get_paths()["include"])) / "Python.h").is_file():
        return "Python's headers (Python.h, of python3-dev or python3-devel)"
    return None


_log = logging.getLogger("segue.compile")


def compile_layers(decoder: nn.Module, device: str) -> int:
    """Compile the repeated layers of `decoder` at their next call; returns their number.

    Returns 0 and logs a line if there are none, or if a CPU has no C++ compiler.
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
    """Compile the `forward` of every block at its next call; hooks added later stay outside. Numbers of rows and tokens
    are symbols. `apart`: modules inside the blocks that stay uncompiled, between pieces of compiled code. Returns the
    number of blocks; without a compiler, returns 0 and logs a line.
    """
    if not _ready(device):
        return 0
    for module in apart:
        module.forward = torch.compiler.disable(module.forward)
    for block in blocks:
        block.forward = one_call(block, torch.compile(block.forward, dynamic=True))
    return len(blocks)


def _ready(device: str) -> bool:
    if device == "cpu" and _compiler() is None:
        _log.warning("compile: no C++ compiler (CXX, g++ or clang++) was found; running uncompiled")
        return False
    if device == "cuda" and (missing := lacks_for_triton()) is not None:
        _log.warning("compile: %s is missing; running uncompiled", missing)
        return False
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache()))
    return True


def repeated_layers(decoder: nn.Module) -> list[nn.Module]:
    """The longest list in `decoder` of modules of one class that have children."""
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
