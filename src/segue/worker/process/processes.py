"""Run a forked process, and set its kernel attributes (prctl): parent-death signal, name, subreaper."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def live(parent: int, name: str, life: Callable[[], object]) -> NoReturn:
    """Run `life` in a child forked by `parent`, under the name `name` and as long as the parent lives, then exit; if it
    raises, with a traceback and status 1."""
    code = 1
    try:
        end_with(parent)
        name_process(name)
        life()
        code = 0
    except SystemExit as end:  # `DeviceLost`, `ReplicaBroken`: only a new process helps
        logging.getLogger(__name__).error("the process %r ends: %s", name, end, exc_info=end.__cause__)
    except BaseException:
        # `life` reports its own errors; any that arrive here are bugs of ours and must be logged
        logging.getLogger(__name__).error("the process %r has ended", name, exc_info=True)
    finally:
        os._exit(code)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the parent (thread) dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before the prctl call


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that they can be reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill and reap all children, including adopted ones."""
    listed = Path("/proc/thread-self/children")
    if not listed.exists():
        return  # the kernel lacks this list: `init` reaps them
    while pids := [int(pid) for pid in listed.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
