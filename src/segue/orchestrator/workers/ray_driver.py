"""The process that keeps agents in a Ray cluster: `python -m segue.orchestrator.workers.ray_driver`.

It reads what `RayAgents` writes, one line of JSON, reserves a host for each node, has an actor there run its agent, and
ends when its input ends, or Ray does. Ray starts an actor that dies again, on the same host or on another one that has
what the node needs. No payload goes through Ray.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from segue.observe.logging import configure_logging
from segue.orchestrator.workers.agent import Agent

log = logging.getLogger(__name__)

_PATIENCE = 30.0
"""Seconds without a host, until we say so."""


class RayAgent:
    """The actor: it runs one agent for as long as it lives."""

    async def run(self, host: str, port: int, token: str, node: str, model: str | None) -> None:
        configure_logging("info", as_json=False)
        await Agent(host, port, token, node, address=None, models={} if model is None else {"": model}).run()


def bundle(node: dict[str, Any]) -> dict[str, float]:
    """Return what is reserved for a node (a `RayNode` as a dict), by Ray's names."""
    found = {"CPU": node["num_cpus"], "GPU": node["num_gpus"], **node["resources"]}
    if node["accelerator_type"] is not None:
        found[f"accelerator_type:{node['accelerator_type']}"] = 0.001  # Ray's way to ask for a host that has one
    return {name: float(amount) for name, amount in found.items() if amount}


def main() -> None:
    configure_logging("info", as_json=False)
    order = json.loads(sys.stdin.readline())
    over = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(over,), daemon=True).start()
    plan, (host, port, token) = order["plan"], order["listen"]
    ray.init(address=plan["address"], namespace="segue", configure_logging=False)
    bundles = {name: bundle(node) for name, node in plan["nodes"].items()}
    group = placement_group(list(bundles.values()), strategy="STRICT_SPREAD")
    try:
        due = time.monotonic() + _PATIENCE
        while not over.is_set() and not group.wait(1):
            if time.monotonic() > due:
                due += _PATIENCE
                log.warning("Ray has no hosts yet, a different one for each of %s", bundles)
        if not over.is_set():
            runs = [
                ray.remote(RayAgent)
                .options(
                    max_restarts=-1,
                    max_task_retries=-1,
                    num_cpus=node["num_cpus"],
                    num_gpus=node["num_gpus"],
                    resources={key: amount for key, amount in bundles[name].items() if key not in ("CPU", "GPU")},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                )
                .remote()
                .run.remote(host, port, token, name, node["model"])
                for index, (name, node) in enumerate(plan["nodes"].items())
            ]
            while not over.is_set():
                ended, _ = ray.wait(runs, timeout=1.0)
                if ended:
                    ray.get(ended[0])  # raises what ended it
    finally:
        remove_placement_group(group)  # and with it the actors
        ray.shutdown()


def _wait_for_the_end(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


if __name__ == "__main__":
    main()
