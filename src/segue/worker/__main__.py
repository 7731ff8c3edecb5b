"""`python -m segue.worker CONTROL_FD RUNTIME_DIR MODULE...`: the fork server of one orchestrator."""

from __future__ import annotations

import os
import socket
import sys

from segue.messages.process import WorkerSpec
from segue.observe.stderr import say
from segue.worker.forkserver import serve


def _run(spec: WorkerSpec) -> None:
    from segue.worker.life import run  # after the preload: it imports torch

    run(spec)


def _no_kernels() -> str:
    from segue.kernels.cpu_kernels import missing  # after the preload, as above

    return missing()


if __name__ == "__main__":
    fd, runtime_dir, *preload = sys.argv[1:]
    serve(socket.socket(fileno=int(fd)), runtime_dir, [*preload, "segue.worker.life"], _run, _no_kernels)
    say("")
    os._exit(0)  # tearing down torch's modules takes a second, and everything that matters is closed
