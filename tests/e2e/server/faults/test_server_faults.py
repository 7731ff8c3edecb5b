"""Processes that die or hang while requests run: the requests are answered, and everything comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import Metrics, Served, body, ids_of, served, spoken

from shm_names import abandoned

CHAT = "/v1/chat/completions"
STAGES = ("input", "encoder", "thinker", "talker", "vocoder")


@pytest.fixture(scope="module")
def server(tiny_dir: Path) -> Iterator[Served]:
    with served(tiny_dir) as server:
        yield server


@pytest.fixture(scope="module")
def right(server: Served) -> dict[str, list[int]]:
    with server.client() as http:
        return ids_of(http.post(CHAT, json=spoken()))


def ask(server: Served, **fields: object) -> dict[str, list[int]]:
    with server.client() as http:
        return ids_of(http.post(CHAT, json=spoken(**fields)))


def running(metrics: Metrics) -> bool:
    return sum(metrics["segue_requests"].values()) > 0


def ready(server: Served, *gone: int) -> None:
    """Every stage, after the death of the processes `gone` was noticed."""
    while not server.health()["ready"] or {process.pid for process in server.family()} & set(gone):
        assert server.process.poll() is None, server.log()


def under_load(pool: ThreadPoolExecutor, server: Served) -> list[Future[dict[str, list[int]]]]:
    answers = [pool.submit(ask, server) for _ in range(6)]
    server.until(lambda metrics: running(metrics) or all(answer.done() for answer in answers))
    return answers


@pytest.mark.parametrize(
    "stage",
    # recovery of each stage is tested without a server too (tests/e2e/recovery)
    [pytest.param(stage, marks=[] if stage in ("input", "talker") else pytest.mark.nightly) for stage in STAGES],
)
def test_a_killed_worker(server: Served, right: dict[str, list[int]], stage: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            answers = under_load(pool, server)
            pid = server.pid(stage)
            os.kill(pid, signal.SIGKILL)
            assert [answer.result() for answer in answers] == [right] * 6
            ready(server, pid)
            assert server.pid(stage) != pid
    assert server.health()["stages"][stage]["replicas"][0]["restarts"] >= 2
    server.until_empty()


def test_health_says_that_a_stage_is_down(server: Served) -> None:
    killed: set[int] = set()
    with server.client() as http:
        while (answer := http.get("/health")).status_code == 200:
            pid = answer.json()["stages"]["talker"]["replicas"][0]["pid"]
            if pid not in killed:  # or it was back before anybody asked
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
    state = answer.json()
    assert (answer.status_code, state["ready"]) == (503, False)
    assert state["stages"]["talker"]["state"] == "restarting"
    assert state["stages"]["thinker"]["state"] == "ready"
    ready(server)
    assert server.health()["stages"]["talker"]["state"] == "ready"


@pytest.mark.nightly
def test_a_killed_fork_server(server: Served, right: dict[str, list[int]]) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = under_load(pool, server)
        old = {process.pid for process in server.family()} - {server.process.pid}
        directory = server.runtime_dir()
        server.fork_server().kill()
        assert [answer.result() for answer in answers] == [right] * 6
        ready(server, *old)
    assert not directory.exists()
    server.until_empty()


def test_a_stopped_worker_and_a_deadline(server: Served, right: dict[str, list[int]]) -> None:
    pid = server.pid("talker")
    os.kill(pid, signal.SIGSTOP)
    try:
        with server.client() as http:
            late = http.post(CHAT, json=spoken(deadline=0.5))
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert ids_of(http.post(CHAT, json=body(return_token_ids=True)))["thinker"], "others do without it"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ask(server) == right
    assert server.pid("talker") == pid
    server.until_empty()


@pytest.mark.nightly
def test_a_worker_that_hangs_is_replaced(tiny_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "deployment.yaml"
    # a worker that a busy machine keeps waiting for so long is replaced, too: that must not use up the retries
    config.write_text("limits: {hang_seconds: 2, max_retries: 50}\n")
    with served(tiny_dir, "--config", str(config)) as own:
        right = ask(own)
        pid = own.pid("thinker")
        os.kill(pid, signal.SIGSTOP)
        assert ask(own) == right
        assert own.pid("thinker") != pid
        assert not psutil.pid_exists(pid)
        assert "has not answered for 2 s" in own.log()
        own.until_empty()


def test_the_server_itself_killed_under_load_leaves_nothing(tiny_dir: Path) -> None:
    with served(tiny_dir) as own, ThreadPoolExecutor(4) as pool:
        before = abandoned()
        directory, family = own.runtime_dir(), own.family()
        answers = [pool.submit(ask, own, max_tokens=20_000, ignore_eos=True) for _ in range(4)]
        own.until(running)
        own.process.kill()
        _, left = psutil.wait_procs(family, timeout=120)
        assert not left
        assert not directory.exists()
        assert abandoned() <= before
        for answer in answers:
            assert isinstance(answer.exception(), httpx.TransportError)
