"""Fifty clients that read one byte per second of speech, and of a video: what they cost is bounded in every process,
and what others get takes the steps that it takes without them.

A client's socket buffer is small, and its segments are (`TCP_MAXSEG`), because a kernel would otherwise take megabytes
of an answer off the server's hands.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from server_process import HOLDINGS, NAME, Metrics, Served, served

CLIENTS = 50
KiB, MiB = 1 << 10, 1 << 20
UNREAD, BUDGET, RETAINED, POOL = 32 * KiB, 2 * MiB, MiB, MiB
ANSWER = 64 * KiB
"""Of an answer, what the HTTP server takes before it waits for the client (uvicorn's high-water mark); pieces that come
while the stages are being told to wait may be as much again."""
ALLOCATOR = 24 * MiB
"""What a process may grow by when it serves fifty requests for the first time: code, stacks, KV blocks, arenas."""
PATIENT = ("--stall-seconds", "3600")
EDGES = 2
"""Of the worker with the most: one from upstream, one to downstream."""
BOUND = CLIENTS * (UNREAD + 2 * ANSWER) + RETAINED + EDGES * (BUDGET + POOL) + ALLOCATOR

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("toy_path")]


def config_of(directory: Path, *stages: str) -> Path:
    """A deployment with small bounds. `stages`: in their order, without `input`."""
    edges = [{"from": one, "to": two, "connector": "shm", "budget": BUDGET} for one, two in pairwise(stages)]
    config = directory / "deployment.yaml"
    settings: dict[str, Any] = {
        "limits": {"unread_bytes": UNREAD, "retained_bytes": RETAINED},
        "defaults": {"max_batch": CLIENTS + 2},
        "stages": {"counter": {"max_model_len": 4096}} if "counter" in stages else {},
        "edges": edges,
        "runtime": {"connectors": {"shm": {"name": "SharedMemoryConnector", "extra": {"pool_bytes": POOL}}}},
    }
    config.write_text(json.dumps(settings))
    return config


@contextmanager
def slow_readers(server: Served, requests: list[bytes]) -> Iterator[list[int]]:
    """Send every request by a connection of its own; read the start of each answer, then a byte per second. Gives the
    number of bytes read of each."""
    address = urlsplit(server.url)
    sockets: list[socket.socket] = []
    over = threading.Event()
    read = [0] * len(requests)

    def crawl() -> None:
        while not over.wait(1):
            for index, one in enumerate(sockets):
                read[index] += len(one.recv(1))

    reader = threading.Thread(target=crawl)
    try:
        for request in requests:
            one = socket.socket()
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KiB)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            one.settimeout(120)
            one.connect((address.hostname, address.port))
            one.sendall(request)
        for index, one in enumerate(sockets):
            first = one.recv(15)
            assert first.startswith(b"HTTP/1.1 200"), first
            read[index] += len(first)
        reader.start()
        yield read
    finally:
        over.set()
        if reader.is_alive():
            reader.join()
        for one in sockets:
            one.close()


def written(method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    kind = "content-type: application/json\r\n" if data else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {len(data)}\r\n\r\n".encode() + data


def memory(server: Served) -> dict[str, int]:
    """PSS of each process, by its pid and name."""
    return {f"{one.pid} {one.name()}": one.memory_full_info().pss for one in server.family()}


def assert_bounded(server: Served, before: dict[str, int], bound: int = BOUND) -> None:
    grown = {name: now - before.get(name, 0) for name, now in memory(server).items()}
    assert {name: size for name, size in grown.items() if size > bound} == {}


def steps(metrics: Metrics, stage: str) -> float:
    counts = metrics["segue_stage_step_seconds_count"]
    return sum(value for labels, value in counts.items() if dict(labels)["stage"] == stage)


def idle(server: Served, stage: str) -> float:
    """Steps of a stage, once it makes no more: what its requests may make before their clients read on is made. A
    worker reports twice a second while something changes."""
    seen, since = -1.0, time.monotonic()

    def still(metrics: Metrics) -> bool:
        nonlocal seen, since
        if (now := steps(metrics, stage)) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 3

    return steps(server.until(still), stage)


def speech(text: str, tokens: int) -> dict[str, Any]:
    sampling = {"counter": {"max_tokens": tokens, "ignore_eos": True}}
    return {"model": NAME, "input": text, "voice": "one", "response_format": "wav", "seed": 1, "sampling": sampling}


def test_speech(toy_dir: Path, tmp_path: Path) -> None:
    tokens, others = 3000, 1
    config = config_of(tmp_path, "counter", "tone", "output")
    with served(toy_dir, "--config", str(config), *PATIENT) as server, server.client() as http:

        def say() -> bytes:
            answer = http.post("/v1/audio/speech", json=speech("quick", tokens))
            assert answer.status_code == 200, answer.text
            return answer.content

        alone = say()
        before = memory(server)
        start = idle(server, "counter")
        say()
        undisturbed = idle(server, "counter") - start
        requests = [written("POST", "/v1/audio/speech", speech(f"slow {one}", tokens)) for one in range(CLIENTS)]
        with slow_readers(server, requests) as read:
            start = idle(server, "counter")
            for _ in range(others):
                assert say() == alone
            made = idle(server, "counter") - start
            assert made <= others * undisturbed + 50
            assert_bounded(server, before)
            assert len(alone) * CLIENTS > 1.3 * BOUND, "if all of it were made, it would show"
            assert max(read) < len(alone) / 10
        server.until_empty()


def test_video(toy_path: None, tmp_path: Path) -> None:
    from segue_toy.family import make
    from segue_toy.film.family import ARCHITECTURE

    frames = 200
    model, config = make(tmp_path / "film", ARCHITECTURE), config_of(tmp_path, "film", "output")
    arguments = ("--config", str(config), "--video-dir", str(tmp_path / "videos"), *PATIENT)
    with served(model, *arguments) as server, server.client() as http:

        def film() -> tuple[str, bytes]:
            made = http.post("/v1/videos", json={"prompt": "noise", "num_frames": frames, "seed": 1})
            assert made.status_code == 200, made.text
            path = f"/v1/videos/{made.json()['id']}"
            while (state := http.get(path).json())["status"] in ("queued", "in_progress"):
                pass
            assert state["status"] == "completed", state
            return path, http.get(f"{path}/content").content

        path, alone = film()
        before = memory(server)
        start = idle(server, "film")
        film()
        undisturbed = idle(server, "film") - start
        with slow_readers(server, [written("GET", f"{path}/content")] * CLIENTS) as read:
            start = idle(server, "film")
            assert film()[1] == alone
            assert idle(server, "film") - start == undisturbed
            assert_bounded(server, before)
            assert len(alone) * CLIENTS > 1.3 * BOUND
            assert max(read) < len(alone) / 10
        server.until_empty([name for name in HOLDINGS if name != "segue_stage_blocks_used"])
