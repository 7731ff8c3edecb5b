"""Which nodes cannot reach each other, as their workers report it.

One lost connection stands for its two nodes: others between them are likely to be lost as well, and would be noticed
only when each had been silent for as long.
"""

from __future__ import annotations

from collections.abc import Set

from segue.orchestrator.workers.replicas import Replica


class Links:
    """The lost connections between live workers of different nodes."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, str], frozenset[str]] = {}
        """(worker that reported it, the other one) → their nodes."""

    def lost(self, worker: Replica, peer: Replica) -> None:
        self._lost[worker.worker, peer.worker] = frozenset((worker.node, peer.node))

    def back(self, worker: Replica, peer: Replica) -> None:
        self._lost.pop((worker.worker, peer.worker), None)

    def keep(self, alive: Set[str]) -> None:
        """Forget the connections of workers that are not alive."""
        self._lost = {pair: nodes for pair, nodes in self._lost.items() if set(pair) <= alive}

    def whole(self) -> bool:
        """Whether every node reaches every other."""
        return not self._lost

    def cut(self, node: str, other: str) -> bool:
        """Whether two nodes cannot reach each other."""
        return {node, other} in self._lost.values()

    def names(self) -> str:
        """Return the pairs of nodes that cannot reach each other, for a message."""
        return ", ".join(sorted(" and ".join(sorted(nodes)) for nodes in set(self._lost.values())))
