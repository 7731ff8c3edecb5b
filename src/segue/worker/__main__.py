"""`python -m segue.worker CONTROL_FD RUNTIME_DIR LOG_LEVEL LOG_FORMAT MODULE...`: the fork server of one orchestrator.

LOG_LEVEL and LOG_FORMAT ("text" or "json") are empty if the program has not configured our logs: then it and its
workers print warnings only, as Python does.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from segue.messages.process import WorkerSpec
from segue.observe.logging import configure_logging
from segue.observe.stderr import say
from segue.worker.process.forkserver import serve
from segue.worker.process.weights_store import WeightsStore


def _run(spec: WorkerSpec, weights: Mapping[str, WeightsStore]) -> None:
    from segue.worker.process.life import run  # after the preload: it imports torch

    run(spec, weights)


def _no_kernels() -> str:
    from segue.kernels.cpu_kernels import missing  # after the preload, as above

    return missing()


if __name__ == "__main__":
    fd, runtime_dir, log_level, log_format, *preload = sys.argv[1:]

    def configure() -> None:
        if log_level:
            configure_logging(log_level, as_json=log_format == "json")

    # `segue.kernels` before the family's modules, which may import transformers first (`torchvision_shim`)
    modules = ["torch", "segue.kernels", *preload, "segue.worker.process.life"]
    serve(socket.socket(fileno=int(fd)), runtime_dir, modules, configure, _run, _no_kernels)
    say("")
    os._exit(0)  # tearing down torch's modules takes a second, and everything that matters is closed
