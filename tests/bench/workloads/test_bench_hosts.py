"""`segue bench hosts` at toy sizes: real processes on two hosts, a killed one, and simulated workers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import psutil
import pytest

from segue.bench.figures import full
from segue.bench.harness.hardware import machine
from segue.bench.harness.results import read_values, result_of
from segue.bench.harness.stats import Ratio, Summary
from segue.bench.hosts import limit
from segue.bench.hosts.hops import FURTHER
from segue.bench.hosts.hosts import sides
from segue.bench.hosts.limit import Asked
from segue.bench.hosts.results import (
    BARE,
    MEMCPY,
    HopRow,
    HostsResult,
    JctRow,
    LimitRow,
    LossRow,
    hop_table,
    markdown,
    scale,
)
from segue.bench.main import main
from segue.messages.errors import ConfigError

pytestmark = pytest.mark.slow
KIB = 1 << 10


def result_in(directory: Path) -> HostsResult:
    file = directory / "hosts.json"
    assert full(file) == file.with_suffix(".md").read_text()
    return result_of(read_values(file), HostsResult, file)


def children() -> set[psutil.Process]:
    return set(psutil.Process(os.getpid()).children(recursive=True))


def test_hops_and_the_limit_are_measured(tmp_path: Path) -> None:
    before = children()
    asked = ["--kib", "4,256", "--hop-rounds", "2", "--simulated", "8", "--steps", "1,3", "--together", "4"]
    assert main(["hosts", "--parts", "hops,limit", *asked, "--seconds", "0.2", "--out", str(tmp_path)]) == 0
    assert children() <= before, "a process was left behind"
    result = result_in(tmp_path)
    ways = [row.way for row in result.hops if row.bytes == 4 * KIB]
    assert set(ways) - set(FURTHER) == {MEMCPY, BARE, "shm", "tcp", "tcp, bfloat16"}
    assert [row.way for row in result.hops if row.bytes == 256 * KIB] == ways
    assert all(row.of_bare == 1.0 for row in result.hops if row.way == BARE)
    assert all(0 < row.median_ms <= row.p90_ms * 1.01 for row in result.hops)
    assert [(row.workers, row.steps) for row in result.limits] == [(8, 1), (8, 3)]
    assert all(1 <= row.cores <= limit.PAIR and row.cpu_us > 0 for row in result.limits)


def test_every_message_of_a_simulated_request_is_counted() -> None:
    """Three stages: Begin, Drop and StageDone each; InputDone of two; emissions."""
    for steps in (1, 4):
        row = asyncio.run(limit.measure(Asked(workers=9, steps=steps, together=3, seconds=0.2)))
        assert row.workers == 9
        assert row.messages == 3 * 3 + 2 + steps + 1
        assert row.per_second > 0
        assert 0 < row.jct.p50 <= row.jct.worst
        assert 0.1 < sum(share for _, share in row.profile) <= 1
        assert any(name.startswith("orchestrator/") for name, _ in row.profile)


@pytest.mark.nightly
def test_more_workers_than_a_context_of_zmq_has_sockets_by_default() -> None:
    row = asyncio.run(limit.measure(Asked(workers=1100, steps=1, together=8, seconds=0.5)))
    assert row.workers == 1100


def test_too_few_workers_for_the_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers is 3; it must be at least 4"):
        asyncio.run(limit.measure(Asked(workers=3, steps=1, together=1, seconds=0.1)))


@pytest.mark.nightly
def test_a_model_over_two_hosts_answers_as_on_one_also_when_a_host_is_killed(tmp_path: Path, tiny_dir: Path) -> None:
    before = children()
    asked = ["--parts", "jct,loss", "--model", str(tiny_dir), "--workers", "2", "--concurrency", "2"]
    assert main(["hosts", *asked, "--requests", "4", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert children() <= before, "a process was left behind"
    result = result_in(tmp_path)
    assert [row.side for row in result.jct] == list(sides([2]))
    assert all(row.equal == 1.0 and 0 < row.ttfa.p50 <= row.jct.p50 for row in result.jct)
    [loss] = result.losses
    assert loss.requests == 4
    assert loss.equal == 1.0
    assert loss.delay.worst >= loss.delay.mean
    assert loss.back.p50 > 0


def test_sides_put_a_single_worker_on_the_other_host() -> None:
    assert sides([1, 2, 4]) == {
        "one host, 1 worker": (1, ("server",)),
        "two hosts, 1 worker": (1, ("node1",)),
        "two hosts, 2 workers": (2, ("server", "node1")),
        "two hosts, 4 workers": (4, ("server", "node1")),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hop-rounds", "1"], "--hop-rounds is 1; it must be at least 2"),
        (["--seconds", "0"], "--seconds is 0; it must be above 0"),
    ],
)
def test_what_would_measure_nothing_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(["hosts", "--parts", "hops", *words])


def made() -> HostsResult:
    summary, ratio = Summary(2.0, 1.5, 3.0, 4.0), Ratio(1.1, 1.0, 1.2, [1.1])
    limits = [
        LimitRow(
            workers=workers,
            steps=1,
            together=64,
            cores=2,
            per_second=2000.0 / workers**0.5,
            cpu_us=300.0,
            workers_cpu_us=100.0,
            messages=13.0,
            jct=summary,
            profile=[("orchestrator/workers/router.py:_choose", 0.4)] if workers == 100 else [],
        )
        for workers in (4, 100)
    ]
    hops = [HopRow(10 << 20, way, 4.0, 5.0, 1.25, 8.0) for way in (MEMCPY, BARE, "tcp")]
    return HostsResult(
        finished="2026-11-26T12:00:00+00:00",
        machine=machine(),
        network="two network namespaces",
        model="qwen2.5-omni-tiny",
        requests=4,
        rounds=1,
        hop_rounds=2,
        hops=[*hops, HopRow(4096, "shm", 0.1, 0.2, 0.5, 9.0)],
        jct=[JctRow(2, "one host, 1 worker", summary, summary, ratio, 1.0)],
        losses=[LossRow(2, 4, summary, summary, summary, 5.0, 9.0, summary, 1.0)],
        limits=limits,
    )


def test_the_report_has_a_table_for_every_part() -> None:
    text = markdown(made())
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 5
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1, block
    assert "The hosts: two network namespaces." in text
    assert "| 10 MiB | 4.00 | 4.00 | 4.00 (1.25×) | – |" in text
    assert "| `orchestrator/workers/router.py:_choose` | 40% |" in text
    assert "| 4 KiB | – | – | – | 0.10 (0.50×) |" in hop_table(made().hops)


def test_the_page_reckons_workers_and_requests() -> None:
    text = scale([made()])
    # 4 workers serve 400 requests/s of 0.01 worker-seconds; the orchestrator carries 1,000, with 100 workers 200
    assert "| 4 | 400 (40%) | 40 (4%) | 4 (0%) | 0.4 (0%) |" in text
    assert "| 100 | **200** | **200** | 100 (50%) | 10 (5%) |" in text
    assert "| 10 MiB | tcp | 4.00 | 1.25× | 2,500 |" in text
    assert "took at most 4.0 s longer; half of them, less than 1.5 s" in text
    assert scale([]) == "There are no figures yet: `segue bench hosts` makes them."


def test_a_later_result_wins_part_by_part() -> None:
    seven = msgspec.structs.replace(made().limits[0], workers=7)
    later = msgspec.structs.replace(made(), hops=[], losses=[], limits=[seven])
    assert "| 7 |" in scale([made(), later])
    assert "| 100 | 1 |" not in scale([made(), later])
    assert "### The network" in scale([made(), later])
