"""Finds the optional package `segue.kernels.cpu`. Without it, or if its code was not compiled, torch's own operators
run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.kernels.cpu.door import CpuKernels


@cache
def cpu_kernels() -> CpuKernels | None:
    """The compiled kernels, and the layers that call them; None if `missing` gives a reason."""
    if missing():
        return None
    from segue.kernels.cpu.door import CpuKernels

    return CpuKernels()


def missing() -> str:
    """Why there are no compiled kernels here, and the remedy, if any; empty if there are some."""
    found = find_spec("segue.kernels.cpu")
    if found is None or found.origin is None:  # a folder without modules has no origin
        return "this installation of Segue has none"
    from segue.kernels.cpu import native

    return native.missing()
