"""Measure the resources of a side during its turns: CPU seconds per process, peak memory of its process tree.

Memory is the proportional set size (PSS), which counts a page shared by n processes as 1/n in each: the sum over
processes is the memory that the side takes from the machine. Segue's orchestrator and the clients of both sides run in
the benchmark's own process, which counts entirely to Segue.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import psutil

from segue.bench.harness.load import LoadDriver, Turn, turn

SAMPLE_SECONDS = 1.0
"""Sampling interval: reading PSS walks the page tables, so it must be rare."""


class SideUsage(msgspec.Struct):
    """The resources of one side, over all its turns."""

    cpu_seconds: dict[str, float] = {}
    """By process: CPU time during the side's turns."""
    others_cpu_seconds: float = 0.0
    """CPU time of the other sides' processes in the same period: should be nearly zero."""
    peak_pss_bytes: int = 0
    peak_rss_bytes: int = 0


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """User and system time of each process so far."""
    used = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            used[pid] = times.user + times.system
    return used


def memory(pids: Iterable[int]) -> tuple[int, int]:
    """(PSS, RSS) bytes of all the processes together."""
    pss = rss = 0
    for pid in pids:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            info = psutil.Process(pid).memory_full_info()
            pss += info.pss
            rss += info.rss
    return pss, rss


def gpu_bytes_used() -> int:
    """Memory in use on all GPUs, by any process; 0 without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    command = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode:
        return 0
    return sum(int(line) for line in answer.stdout.split()) * 2**20


class Watch:
    """Measures one side's processes during its turns."""

    def __init__(self, names: dict[int, str], others: Iterable[int]) -> None:
        """`names`: process names for the report. `others`: processes that should be idle meanwhile."""
        self._names = names
        self._others = frozenset(others) - names.keys() - {os.getpid()}
        self.usage = SideUsage()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """A context around one turn of the side."""
        before = cpu_seconds([*self._names, *self._others])
        sampler = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
            for pid, value in cpu_seconds([*self._names, *self._others]).items():
                spent = value - before.get(pid, value)
                if pid in self._others:
                    self.usage.others_cpu_seconds += spent
                else:
                    name = self._names[pid]
                    self.usage.cpu_seconds[name] = self.usage.cpu_seconds.get(name, 0.0) + spent
            await self._measure()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            await self._measure()

    async def _measure(self) -> None:
        pss, rss = await asyncio.to_thread(memory, list(self._names))
        self.usage.peak_pss_bytes = max(self.usage.peak_pss_bytes, pss)
        self.usage.peak_rss_bytes = max(self.usage.peak_rss_bytes, rss)


def watched(drivers: Sequence[LoadDriver[Any, Any]]) -> tuple[Turn, dict[str, SideUsage]]:
    """A context for each side's turns in `in_turn`, and what the sides will have used in them, by name."""
    everyone = [pid for driver in drivers for pid in driver.processes()]
    watches = {driver.name: Watch(driver.processes(), everyone) for driver in drivers}

    @asynccontextmanager
    async def its_turn(driver: LoadDriver[Any, Any], together: int) -> AsyncIterator[None]:
        async with turn(driver, together), watches[driver.name].watching():
            yield

    return its_turn, {name: watch.usage for name, watch in watches.items()}
