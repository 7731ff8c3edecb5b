"""Clients that leave, read slowly or come all at once: nothing of theirs stays, and the others get their answers."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Metrics, Served, body, ids_of, served, spoken

CHAT = "/v1/chat/completions"
MAX_WAITING = 24
CONFIG = f"""
limits: {{max_waiting: {MAX_WAITING}}}
stages: {{thinker: {{kv_blocks: 512}}, talker: {{kv_blocks: 512}}}}  # so few that all of them are soon in memory
"""


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("clients") / "deployment.yaml"
    config.write_text(CONFIG)
    with served(tiny_dir, "--config", str(config), "--log-level", "warning") as server:
        yield server


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def post(server: Served, fields: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A raw client that has sent its request."""
    url = httpx.URL(server.url)
    data = json.dumps(fields).encode()
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(240)
    assert url.port is not None
    sock.connect((url.host, url.port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def total(metrics: Metrics, name: str) -> float:
    return sum(metrics[name].values())


LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_client_that_leaves_while_its_request_runs(server: Served, stream: bool) -> None:
    with server.nobody_finishes():
        sock = post(server, body(stream=stream, **LONG))
        server.until(lambda metrics: total(metrics, "segue_stage_blocks_used") > 0)
        sock.close()


def test_a_client_that_leaves_in_the_middle_of_its_speech(server: Served) -> None:
    request = spoken(stream=True)
    request["sampling"]["talker"] = {"max_tokens": 2000, "ignore_eos": True}
    with server.nobody_finishes():
        sock = post(server, request)
        seen = b""
        while b'"data":' not in seen:
            seen = seen[-10:] + sock.recv(4096)
        sock.close()


def test_a_client_that_leaves_at_once(server: Served) -> None:
    def heard(metrics: Metrics) -> float:
        answers = metrics["segue_http_requests_total"]
        return sum(count for labels, count in answers.items() if dict(labels)["method"] == "POST")

    before = heard(server.metrics())
    with server.nobody_finishes():
        for _ in range(10):
            post(server, body(**LONG)).close()
        server.until(lambda metrics: heard(metrics) == before + 10)


def test_clients_that_leave_the_queue(server: Served) -> None:
    with server.nobody_finishes():
        socks = [post(server, body(**LONG)) for _ in range(MAX_WAITING)]
        server.until(lambda metrics: total(metrics, "segue_requests") == MAX_WAITING)
        with server.client() as http:
            refused = http.post(CHAT, json=body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["Retry-After"]
        for sock in socks:
            sock.close()


def test_a_client_that_goes_on_half_a_request(server: Served, http: httpx.Client) -> None:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0)) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
        assert ids_of(http.post(CHAT, json=body(return_token_ids=True)))
    server.until_empty()


def test_a_slow_reader_holds_up_nobody(server: Served, http: httpx.Client) -> None:
    alone = http.post(CHAT, json=spoken()).json()["choices"]
    request = spoken(stream=True)
    request["sampling"]["talker"] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    slow = post(server, request, receive_buffer=4096)
    assert slow.recv(1)
    for _ in range(5):
        with_others = http.post(CHAT, json=spoken()).json()["choices"]
        assert slow.recv(1)
        assert with_others[0]["segue"]["token_ids"] == alone[0]["segue"]["token_ids"]
    slow.close()
    server.until_empty()


@pytest.mark.nightly
def test_more_clients_than_there_is_room_for(server: Served, http: httpx.Client) -> None:
    right = ids_of(http.post(CHAT, json=body(return_token_ids=True)))

    def ask(number: int) -> int:
        with server.client() as client:
            answer = client.post(CHAT, json=body(return_token_ids=True))
        if answer.status_code == 200:
            assert ids_of(answer) == right
        else:
            assert answer.json()["error"]["type"] == "rate_limit_error"
        return answer.status_code

    # two places are left for all of them
    socks = [post(server, body(**LONG)) for _ in range(MAX_WAITING - 2)]
    server.until(lambda metrics: total(metrics, "segue_requests") == MAX_WAITING - 2)
    with ThreadPoolExecutor(100) as pool:
        counts = Counter(pool.map(ask, range(300)))
    for sock in socks:
        sock.close()
    assert counts.keys() == {200, 429}
    server.until_empty()


def test_a_mixed_load_with_cancels_leaves_nothing(server: Served, http: httpx.Client) -> None:
    """The same load again and again: in the end no process holds more than before it. What a round needs for the first
    time (a thread of a pool, memory for a larger batch) it may keep; what leaks, every round adds."""
    right = ids_of(http.post(CHAT, json=spoken()))

    def client(seed: int) -> None:
        choose = random.Random(seed)
        with server.client() as own:
            for _ in range(12):
                match choose.randrange(4):
                    case 0:
                        assert ids_of(own.post(CHAT, json=spoken())) == right
                    case 1:
                        own.post(CHAT, json=body(temperature=9))
                    case 2:
                        sock = post(server, spoken(stream=True))
                        sock.recv(choose.randrange(1, 3000))
                        sock.close()
                    case 3:
                        with own.stream("POST", CHAT, json=body(stream=True, n=2)) as answer:
                            assert answer.status_code == 200
                            if choose.random() < 0.5:
                                answer.read()

    def more(pid: int, before: tuple[int, int, int], after: tuple[int, int, int]) -> list[str]:
        # the server's own: connections that are closing, threads of its pools that were not needed before
        spare = 12 if pid == server.process.pid else 0
        kinds = zip(("descriptors", "threads", "bytes"), before, after, (spare, spare, 24 << 20), strict=True)
        return [f"{pid}: {old} {kind}, then {new}" for kind, old, new, room in kinds if new > old + room]

    def load(round_number: int) -> dict[int, tuple[int, int, int]]:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(client, range(6 * round_number, 6 * round_number + 6)))
        server.until_empty()
        return {
            process.pid: (process.num_fds(), process.num_threads(), process.memory_info().rss)
            for process in server.family()
        }

    load(0)
    after = load(1)
    for number in range(2, 8):
        before, after = after, load(number)
        assert after.keys() == before.keys(), "a worker has died"
        if not (grown := [told for pid in after for told in more(pid, before[pid], after[pid])]):
            break
    assert not grown
    assert ids_of(http.post(CHAT, json=spoken())) == right


def test_the_numbers_are_there_for_each_stage_and_edge(server: Served, http: httpx.Client) -> None:
    assert ids_of(http.post(CHAT, json=spoken()))
    metrics = server.until_empty()
    stages = {"input", "encoder", "thinker", "talker", "vocoder", "output"}
    for name in ("waiting", "running", "batch_size_count", "step_seconds_count", "first_output_seconds_count"):
        rows = metrics[f"segue_stage_{name}"]
        assert {dict(labels)["stage"] for labels in rows} == stages, name
    assert {dict(labels)["stage"] for labels in metrics["segue_stage_errors_total"]} == stages
    hops = metrics["segue_edge_hop_seconds_count"]
    assert {dict(labels)["edge"] for labels in hops} == {
        "input->encoder",
        "input->thinker",
        "encoder->thinker",
        "thinker->talker",
        "talker->vocoder",
        "vocoder->output",
    }
    assert all(count > 0 for labels, count in hops.items() if dict(labels)["edge"] == "talker->vocoder")
