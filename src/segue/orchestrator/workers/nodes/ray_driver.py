"""The process that keeps agents in a Ray cluster: `python -m segue.orchestrator.workers.nodes.ray_driver`.

It reads what `RayAgents` writes, lines of JSON: first its order, then, whenever they change, the nodes that are needed
for now. It reserves a host for each node, has an actor there run its agent, and ends when its input ends, or Ray does.
Ray starts an actor that dies again, on the same host or on another one that has what the node needs. No payload goes
through Ray.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from segue.observe.logging import configure_logging
from segue.orchestrator.workers.nodes.agent import Agent

log = logging.getLogger(__name__)

_PATIENCE = 30.0
"""Seconds without a host, until we say so."""


class RayAgent:
    """The actor: it runs one agent for as long as it lives."""

    async def run(self, host: str, port: int, token: str, node: str, model: str | None) -> None:
        configure_logging("info", as_json=False)
        await Agent(host, port, token, node, address=None, models={} if model is None else {"": model}).run()


class Input:
    """What the server says, read by a thread."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = json.loads(sys.stdin.readline())
        self.wanted: list[str] = []
        """The nodes that are needed for now."""
        self.over = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.wanted = json.loads(line)
        self.over.set()


class Nodes:
    """The nodes in the cluster."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._listen: list[Any] = order["listen"]
        self._plans: dict[str, dict[str, Any]] = order["plan"]["nodes"]
        self._always: list[str] = order["always"]
        self._groups: list[PlacementGroup] = []
        self._more: dict[str, PlacementGroup] = {}
        """Of the nodes that are needed for now."""
        self._runs: dict[str, Any] = {}
        """Node → the result of its agent, which comes if it fails."""

    def start(self, given: Input) -> None:
        """Start the nodes that are there all the time, each on a host of its own."""
        if not self._always:
            return
        bundles = [bundle(self._plans[name]) for name in self._always]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        self._groups.append(group)
        due = time.monotonic() + _PATIENCE
        while not given.over.is_set() and not group.wait(1):
            if time.monotonic() > due:
                due += _PATIENCE
                missing = dict(zip(self._always, bundles, strict=True))
                log.warning("Ray has no hosts yet, a different one for each of %s", missing)
        for index, name in enumerate(self._always):
            self._run(name, group, index)

    def _run(self, name: str, group: PlacementGroup, index: int) -> None:
        node = self._plans[name]
        actor = ray.remote(RayAgent).options(
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=node["num_cpus"],
            num_gpus=node["num_gpus"],
            resources={key: amount for key, amount in bundle(node).items() if key not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        self._runs[name] = actor.remote().run.remote(*self._listen, name, node["model"])

    def change(self, wanted: list[str]) -> None:
        """Ask for the nodes that are needed for now, and give back those that were."""
        for name in [name for name in self._more if name not in wanted]:
            log.info("giving back node %s", name)
            del self._runs[name]
            remove_placement_group(self._more.pop(name))  # and with it the actor
        for name in [name for name in wanted if name not in self._more]:
            log.info("asking Ray for node %s", name)
            group = self._more[name] = placement_group([bundle(self._plans[name])], strategy="STRICT_PACK")
            self._run(name, group, 0)  # waits for the host

    def wait(self, seconds: float) -> None:
        """Let time pass; raises what ended an agent."""
        if not self._runs:
            time.sleep(seconds)
            return
        ended, _ = ray.wait(list(self._runs.values()), timeout=seconds)
        if ended:
            ray.get(ended[0])

    def end(self) -> None:
        for group in (*self._groups, *self._more.values()):
            remove_placement_group(group)  # and with it the actors


def bundle(node: dict[str, Any]) -> dict[str, float]:
    """Return what is reserved for a node (a `RayNode` as a dict), by Ray's names."""
    found = {"CPU": node["num_cpus"], "GPU": node["num_gpus"], **node["resources"]}
    if node["accelerator_type"] is not None:
        found[f"accelerator_type:{node['accelerator_type']}"] = 0.001  # Ray's way to ask for a host that has one
    return {name: float(amount) for name, amount in found.items() if amount}


def main() -> None:
    configure_logging("info", as_json=False)
    given = Input()
    ray.init(address=given.order["plan"]["address"], namespace="segue", configure_logging=False)
    nodes = Nodes(given.order)
    try:
        nodes.start(given)
        while not given.over.is_set():
            nodes.change(given.wanted)
            nodes.wait(1.0)
    finally:
        nodes.end()
        ray.shutdown()


if __name__ == "__main__":
    main()
