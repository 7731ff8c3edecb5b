"""What a process asks of the kernel for itself."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask for SIGKILL when the parent (thread) dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that they can be reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill and reap all children, those adopted meanwhile too."""
    listed = Path("/proc/thread-self/children")
    if not listed.exists():
        return  # a kernel without this list: `init` reaps them
    while pids := [int(pid) for pid in listed.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def name_process(name: str) -> None:
    """The name `ps` and `top` show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
