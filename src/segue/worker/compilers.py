"""The process in which a worker's grammars are compiled: forked with it, asleep until the first is wanted.

Where it is killed, `python -m segue.worker.compilers CONTROL_FD WORKER_PID NAME` takes its place: by then the worker
has threads and a device, and must not be forked.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback

import msgspec

from segue.engines.autoregressive.grammar_process import CompilerHome, Home, keep_home
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
    worker, name = os.getpid(), f"segue-{spec.worker}+g"
    if (pid := os.fork()) == 0:
        ours.close()
        _become_home(theirs, worker, name)
    theirs.close()
    return CompilerHome(Home(ours, lambda: os.waitpid(pid, 0)), lambda: _start_home(worker, name))


def _start_home(worker: int, name: str) -> Home:
    """Another one, which has to import everything first."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(worker), name],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        except OSError:
            ours.close()
            raise
    return Home(ours, process.wait)


def _become_home(control: socket.socket, worker: int, name: str) -> None:
    """The process itself; never returns."""
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


if __name__ == "__main__":
    _become_home(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
