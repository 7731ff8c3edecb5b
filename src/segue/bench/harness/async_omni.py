"""Segue as one side of a benchmark: `AsyncOmni`, with the clients in the orchestrator's process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from segue.messages.stats import WorkerStats
from segue.orchestrator.omni.async_omni import AsyncOmni


class AsyncOmniDriver:
    """Shared by all benchmarks: a `LoadDriver` without `run`."""

    def __init__(self, name: str, model_dir: Path, **settings: Any) -> None:
        """`settings`: arguments of `AsyncOmni`."""
        self.name = name
        self.startup = 0.0
        self._omni = AsyncOmni(model_dir, **settings)

    async def start(self) -> None:
        began = time.monotonic()
        await self._omni.start()
        self.startup = time.monotonic() - began

    async def take_over(self, together: int) -> None:
        """Nothing to do: the engines batch by themselves."""

    async def hand_over(self) -> None:
        """Nothing to do: idle workers wait on their sockets."""

    async def stop(self) -> None:
        await self._omni.stop()

    def processes(self) -> dict[int, str]:
        """Every process of this side, with its role."""
        names = {os.getpid(): "orchestrator and clients"}
        for stage, health in self._omni.health().stages.items():
            for number, replica in enumerate(health.replicas):
                if replica.pid is not None:
                    known = names.get(replica.pid)
                    label = stage if number == 0 else f"{stage}.{number}"
                    names[replica.pid] = label if known is None else f"{known}+{label}"
        return names

    def stats(self) -> list[WorkerStats]:
        """The last reported statistics of every stage."""
        return [stage for stats in self._omni.orchestrator.stats.values() for stage in stats.stages]
