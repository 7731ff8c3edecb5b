"""The process that compiles a worker's grammars: forked at the worker's start, it sleeps until the first grammar.

If it is killed, `python -m segue.worker.process.compilers CONTROL_FD WORKER_PID NAME` replaces it: by then the worker
has threads and a device, and must not fork.

Optional reading: grammars compile there, apart from the worker.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from segue.engines.autoregressive.grammar.process import CompilerHome, Home, keep_home
from segue.graph.deployment.deployment import Limits
from segue.graph.kinds.registry import kind_of
from segue.messages.process import WorkerSpec
from segue.worker.process.processes import end_with, live


def fork_home(spec: WorkerSpec) -> CompilerHome | None:
    """Fork the compiler process of a worker with a stage that samples tokens; None for any other. Only the worker
    returns.

    The fork happens before the worker has a thread, a socket of its own or a device; the process ends with the worker.
    """
    if not any(kind_of(stage["engine"]).samples for stage in spec.stages):
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker, name = os.getpid(), f"segue-{spec.worker}+g"
    if (pid := os.fork()) == 0:
        ours.close()
        live(worker, name, lambda: _keep(theirs))
    theirs.close()
    memory = msgspec.convert(spec.limits, Limits).max_grammar_bytes
    return CompilerHome(Home(ours, lambda: os.waitpid(pid, 0)), lambda: _start_home(worker, name), memory)


def _start_home(worker: int, name: str) -> Home:
    """Start a replacement, which has to import everything first."""
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


def _keep(control: socket.socket) -> None:
    """Run the compiler process."""
    home = os.getpid()
    keep_home(control, lambda: end_with(home))


if __name__ == "__main__":
    live(int(sys.argv[2]), sys.argv[3], lambda: _keep(socket.socket(fileno=int(sys.argv[1]))))
