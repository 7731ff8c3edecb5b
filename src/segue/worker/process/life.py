"""Run a worker's process from its fork to its exit."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from segue.messages.errors import SegueError
from segue.messages.process import WorkerSpec
from segue.messages.wire import StartFailed, encode
from segue.observe.logging import configure_logging, configured
from segue.worker.build import build
from segue.worker.edges.peers import Peers
from segue.worker.kinds.kind import Host
from segue.worker.process.compilers import fork_home
from segue.worker.process.ranks import fork_ranks
from segue.worker.process.weights_store import WeightsStore
from segue.worker.worker import Worker

log = logging.getLogger(__name__)

START_FAILED_PATIENCE = 60.0
"""Seconds for the orchestrator to receive why a worker could not start; if it dies, this process dies, too."""


def run(spec: WorkerSpec, weights: Mapping[str, WeightsStore]) -> None:
    """Build and run a worker until it exits; called in a process of its own. `weights`: stores of shared weights, by
    stage."""
    # transformers warns at each load of every config in which one part names ids of another part's vocabulary
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if (logs := configured()) is not None:  # as the fork server's are
        level, as_json = logs
        configure_logging(level, as_json=as_json, worker=spec.worker)
    ranks = fork_ranks(spec)
    home = fork_home(spec)
    peers = Peers(spec.inbox, spec.network, server=spec.orchestrator, name=spec.worker)
    try:
        try:
            host = Host(peers.wake, home)
            built = build(spec, lambda message: peers.send(spec.orchestrator, encode(message)), host, ranks, weights)
        except Exception as error:
            # any exception of loading is reported as the reason why the worker did not start
            if not isinstance(error, SegueError):
                log.error("the worker could not start", exc_info=error)
            peers.send(
                spec.orchestrator,
                encode(StartFailed(spec.worker, type(error).__name__, f"{type(error).__name__}: {error}")),
            )
            peers.close(START_FAILED_PATIENCE)
            return
        if ranks is not None:
            ranks.serve()
        with torch.inference_mode():
            Worker(spec, built, peers).loop()
    finally:
        peers.close()
        if home is not None:
            home.close()
        if ranks is not None:
            ranks.close()
