"""Watching processes: real ones."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from segue.bench.harness.meters import Watch, cpu_seconds, memory

# computes for a quarter of a second of CPU time whenever it is told to, holding 64 MiB
PROGRAM = """
import sys, time
held = b"x" * (64 << 20)
for line in sys.stdin:
    until = time.process_time() + 0.25
    while time.process_time() < until:
        pass
    print("done", flush=True)
"""


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.communicate()


def work(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_a_turn_counts_what_its_side_computes_and_what_others_do(workers: list[subprocess.Popen[str]]) -> None:
    for process in workers:
        work(process)  # before the turn: not counted
    mine, other = (process.pid for process in workers)

    async def turns() -> Watch:
        watch = Watch({mine: "worker"}, [mine, other])
        for _ in range(2):
            async with watch.watching():
                await asyncio.to_thread(work, workers[0])
            work(workers[0])  # between the turns
        async with watch.watching():
            await asyncio.to_thread(work, workers[1])
        return watch

    usage = asyncio.run(turns()).usage
    assert usage.cpu_seconds["worker"] == pytest.approx(0.5, abs=0.1)
    assert usage.others_cpu_seconds == pytest.approx(0.25, abs=0.06)
    assert 64 << 20 < usage.peak_pss_bytes <= usage.peak_rss_bytes < 1 << 30


def test_a_process_that_is_gone_counts_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_seconds([gone.pid]) == {}
    assert memory([gone.pid]) == (0, 0)
    assert memory([os.getpid()])[0] > 0
