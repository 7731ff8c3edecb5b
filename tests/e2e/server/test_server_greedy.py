"""Clients that ask for more than their share: each on one live server, beside a pulse of ordinary requests.

What the others notice is counted in generations and order of events, not in seconds. A file
that takes long to decode is played by a worker of the input stage that is stopped (SIGSTOP): it takes for ever.
"""

from __future__ import annotations

import base64
import fractions
import io
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import av
import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from server_process import NAME, Metrics, Served, body, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONNECTIONS, BODIES = 24, 96 << 20
DEPLOYMENT = """
stages: {input: {replicas: 3}}
limits: {max_prompts: 512, max_decoded_pixels: 100000000, max_choices: 600}
"""


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("greedy") / "deployment.yaml"
    config.write_text(DEPLOYMENT)
    more = ("--max-connections", str(CONNECTIONS), "--max-bodies-bytes", str(BODIES))
    with served(tiny_dir, "--config", str(config), *more) as server:
        ready = threading.Event()
        while not ready.is_set():  # the server is ready with one of the three
            replicas = server.health()["stages"]["input"]["replicas"]
            ready.set() if all(one["state"] == "ready" for one in replicas) else None
        yield server


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    return sum(value for key, value in metrics.get(name, {}).items() if labels.items() <= dict(key).items())


def generations(server: Served) -> float:
    """Generations that the stages were asked for and that ended, however they did; the server itself counts them."""
    return counted(server.until_empty(), "segue_generations_total")


def pulse(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=body())
    assert answer.status_code == 200, answer.text


def part(kind: str, mime: str, data: bytes) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def make_image(side: int, kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side)).save(file, kind)
    return file.getvalue()


def skipping(times: int) -> bytes:
    """An MP4 of 100 × `times` equal frames of 640 × 368, 10,000 per second: some 40 bytes each."""
    coded, file = io.BytesIO(), io.BytesIO()
    with av.open(coded, "w", format="mp4") as source:
        stream = source.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 640, 368, "yuv420p"
        stream.options = {"preset": "ultrafast", "g": "1000", "tune": "zerolatency", "x264-params": "scenecut=0"}
        packets = []
        for number in range(100):
            frame = av.VideoFrame.from_ndarray(np.zeros((368, 640, 3), np.uint8), format="rgb24")
            frame.pts = number
            packets += [bytes(packet) for packet in stream.encode(frame)]
        packets += [bytes(packet) for packet in stream.encode(None)]
    with av.open(file, "w", format="mp4") as target:
        stream = target.add_stream("libx264", rate=10000)
        stream.width, stream.height, stream.pix_fmt = 640, 368, "yuv420p"
        stream.options = {"preset": "ultrafast"}
        for number, data in enumerate(packets * times):
            packet = av.Packet(data)
            packet.pts = packet.dts = number
            packet.time_base = fractions.Fraction(1, 10000)
            packet.stream, packet.is_keyframe = stream, number % len(packets) == 0
            target.mux(packet)
    return file.getvalue()


def chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps(body(**fields)).encode()


def completion(**fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"model": NAME, "max_tokens": 1, **fields}).encode()


AT_THE_DOOR: dict[str, tuple[Callable[[], tuple[str, bytes]], int, str | None, str]] = {
    "stop": (lambda: chat(stop=["z"] * 20_000), 400, "stop", "limits.max_stop_strings"),
    "stop of a stage": (
        lambda: chat(sampling={"thinker": {"stop": [f"zq{number}" for number in range(900_000)]}}),
        400,
        "sampling.thinker.stop",
        "900000 entries; at most 16",
    ),
    "long stop": (lambda: chat(stop=["x" * 5000]), 413, "stop", "limits.max_stop_bytes"),
    "prompts": (
        lambda: completion(prompt=["a"] * 200_000, n=16),
        400,
        "prompt",
        "200000 entries; at most 512 are taken (limits.max_prompts)",
    ),
    "prompts times n": (lambda: completion(prompt=["a"] * 500, n=2), 400, "prompt", "limits.max_choices"),
    "ids": (lambda: chat(messages=None, prompt_token_ids=[1] * 2_000_000), 400, None, "limits.max_json_values"),
    "bias": (
        lambda: chat(logit_bias={str(number): 1 for number in range(70_000)}),
        400,
        "logit_bias",
        "limits.max_token_ids",
    ),
    "suppressed": (lambda: chat(suppress_tokens=[1] * 70_000), 400, "suppress_tokens", "limits.max_token_ids"),
    "bad words": (lambda: chat(bad_words=["x"] * 2000), 400, "bad_words", "limits.max_bad_words"),
    "tools": (
        lambda: chat(tools=[{"type": "function", "function": {"name": f"f{n}"}} for n in range(600)]),
        400,
        "tools",
        "limits.max_tools",
    ),
    "messages": (
        lambda: chat(messages=[{"role": "user", "content": "x"}] * 5000),
        400,
        "messages",
        "limits.max_messages",
    ),
    "parts": (lambda: chat(messages=user(*[{"type": "text", "text": "x"}] * 5000)), 400, "messages", "max_parts"),
    "media": (
        lambda: chat(messages=user(*[part("image", "image/png", make_image(200, "PNG"))] * 65)),
        400,
        "messages",
        "65 media parts; at most 64",
    ),
    "choice": (
        lambda: chat(structured_outputs={"choice": [f"{number}" for number in range(5000)]}),
        400,
        "structured_outputs.choice",
        "limits.max_structured_choices",
    ),
    "values": (lambda: (CHAT, b'{"x": [' + b"[]," * 5_000_000 + b"1]}"), 400, None, "limits.max_json_values"),
    "depth": (lambda: (CHAT, b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}"), 400, None, "limits.max_json_depth"),
    "key": (lambda: (CHAT, b'{"model": "tiny", "' + b"ab" * 3_000_000 + b'": 1}'), 400, "ab" * 128 + "…", "unknown"),
}


@pytest.mark.parametrize("case", AT_THE_DOOR)
def test_what_is_too_much_costs_the_stages_nothing(server: Served, http: httpx.Client, case: str) -> None:
    make, status, field, says = AT_THE_DOOR[case]
    path, data = make()
    before = generations(server)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(http.post, path, content=data, headers={"Content-Type": "application/json"})
        pulses = 0
        while not asked.done() or pulses < 2:
            pulse(http)
            pulses += 1
        answer = asked.result()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, field), error
    assert says in error["message"]
    assert generations(server) - before == pulses


def test_a_list_that_is_taken_leaves_others_their_turn(server: Served) -> None:
    """A request that comes when one of 512 prompts has begun is answered long before that one is."""
    asked = {"model": NAME, "prompt": ["a"] * 512, "max_tokens": 32, "temperature": 0, "stream": True}
    with server.client() as greedy, server.client() as http, greedy.stream("POST", COMPLETIONS, json=asked) as answer:
        lines = answer.iter_lines()  # once nobody has it, the response is closed
        next(lines)
        pulse(http)
        ended = counted(server.metrics(), "segue_generations_total")
        begun = counted(server.metrics(), "segue_requests")
    assert begun <= 128
    server.until_empty()
    assert ended < counted(server.metrics(), "segue_generations_total"), "its generations had all ended"


def rss(server: Served) -> int:
    return max(child.memory_info().rss for child in server.family() if child.name().startswith("segue-input"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: part("video", "image/gif", make_image(16_000, "GIF", "P")), "max_image_pixels"),
        (lambda: part("image", "image/gif", make_image(16_000, "GIF", "P")), "max_image_pixels"),
        (lambda: part("video", "video/mp4", skipping(20)), "max_decoded_pixels"),
    ],
    ids=["gif as video", "gif", "skipped frames"],
)
def test_media_are_refused_by_what_they_would_cost(
    server: Served, http: httpx.Client, make: Callable[[], dict[str, Any]], says: str
) -> None:
    before, peaks = rss(server), []
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(http.post, CHAT, json=body(messages=user(make())))
        while not asked.done():
            pulse(http)
            peaks.append(rss(server))
        answer = asked.result()
    assert answer.status_code == 413, answer.text
    assert says in answer.json()["error"]["message"]
    assert max(peaks, default=before) - before < 400 << 20, "a frame of 16,000 × 16,000 pixels takes 1 GB"


@contextmanager
def stopped(server: Served, number: int) -> Iterator[None]:
    """A worker of the input stage takes no step: the one that the next request goes to, where those before it decode
    and those behind it do nothing."""
    process = psutil.Process(server.health()["stages"]["input"]["replicas"][number]["pid"])
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def seen(http: httpx.Client) -> httpx.Response:
    return http.post(CHAT, json=body(messages=user(part("image", "image/png", make_image(64, "PNG")))))


def head(size: int) -> bytes:
    names = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {size}")
    return "\r\n".join((f"POST {CHAT} HTTP/1.1", *names, "\r\n")).encode()


def admitted(server: Served, count: int) -> None:
    server.until(lambda metrics: counted(metrics, "segue_requests") == count)


def test_a_slow_file_delays_its_own_request(server: Served, http: httpx.Client) -> None:
    """Text passes however many are being decoded; the next medium passes one of them; and a client that leaves does not
    free the worker that is still at its file."""
    server.until_empty()
    with ThreadPoolExecutor(4) as threads, ExitStack() as stack:
        stack.enter_context(stopped(server, 0))
        slow: list[Future[httpx.Response]] = [threads.submit(seen, http)]
        admitted(server, 1)
        for _ in range(3):
            pulse(http)
        stack.enter_context(stopped(server, 1))
        left = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
        data = json.dumps(body(messages=user(part("image", "image/png", make_image(32, "PNG"))))).encode()
        left.sendall(head(len(data)) + data)
        admitted(server, 2)
        left.close()
        admitted(server, 1)
        slow.append(threads.submit(seen, http))  # both workers that decode are taken: it waits
        admitted(server, 2)
        for _ in range(3):
            pulse(http)
        assert not any(one.done() for one in slow)
        stack.close()
        assert [one.result().status_code for one in slow] == [200, 200]


def test_one_slow_file_leaves_room_for_other_files(server: Served, http: httpx.Client) -> None:
    server.until_empty()
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        stack.enter_context(stopped(server, 0))
        slow = threads.submit(seen, http)
        admitted(server, 1)
        for _ in range(3):
            assert seen(http).status_code == 200
        assert not slow.done()
        stack.close()
        assert slow.result().status_code == 200


def test_connections_that_say_nothing_leave_the_others_alone(server: Served, http: httpx.Client) -> None:
    pulse(http)  # its connection stays open
    address = urlsplit(server.url)
    with ExitStack() as stack:
        silent = []
        for _ in range(2 * CONNECTIONS):
            one = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            silent.append(one)
        answer = b""
        while piece := silent[-1].recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 503"), answer
        assert b"etry-" in answer, answer
        assert b"max_connections" in answer, answer
        pulse(http)


def test_bodies_that_wait_are_bounded_together(server: Served, http: httpx.Client) -> None:
    """Two thirds of the bound are held by a body that does not end; another like it is refused, small ones are not."""
    address, size = urlsplit(server.url), BODIES * 2 // 3
    with socket.create_connection((address.hostname, address.port)) as held:
        held.sendall(head(size) + b" " * (size - 1))
        answer = http.post(CHAT, content=b" " * size, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_busy"), answer.text
        assert answer.headers["Retry-After"]
        pulse(http)
    pulse(http)


def test_all_is_as_it_was(server: Served) -> None:
    """Nothing is held, and no worker had to be started again."""
    server.until_empty()
    assert all(one["restarts"] == 0 for stage in server.health()["stages"].values() for one in stage["replicas"])
    assert os.path.isdir(server.runtime_dir())
