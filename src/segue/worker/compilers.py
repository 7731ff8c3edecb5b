"""The process in which a worker's grammars are compiled: forked with it, asleep until the first is wanted."""

from __future__ import annotations

import os
import socket
import traceback

import msgspec

from segue.engines.autoregressive.grammar_process import CompilerHome, keep_home
from segue.graph.deployment import StagePlan
from segue.messages.process import WorkerSpec
from segue.worker.processes import die_with_parent, name_process


def fork_home(spec: WorkerSpec) -> CompilerHome | None:
    """Fork the home of a worker that has an autoregressive stage; None for any other. Only the worker returns.

    It is forked before the worker has a thread, a socket of its own or a device; it ends with the worker.
    """
    plans = [msgspec.convert(stage, StagePlan) for stage in spec.stages]
    if all(plan.engine != "autoregressive" for plan in plans):
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = os.getpid()
    if os.fork() == 0:
        ours.close()
        _become_home(theirs, worker, f"segue-{spec.worker}+g")
    theirs.close()
    return CompilerHome(ours)


def _become_home(control: socket.socket, worker: int, name: str) -> None:
    """The child's side of the fork; never returns."""
    code = 1
    try:
        die_with_parent()
        if os.getppid() != worker:
            os._exit(0)  # it died before the kernel was told
        name_process(name)
        home = os.getpid()
        keep_home(control, lambda: _end_with(home))
        code = 0
    except BaseException:
        traceback.print_exc()  # the worker learns only that nobody answers
    finally:
        os._exit(code)


def _end_with(home: int) -> None:
    """Called in a child of the home."""
    die_with_parent()
    if os.getppid() != home:
        os._exit(0)
