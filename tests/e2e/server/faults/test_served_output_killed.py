"""kill -9 of the output stage while speech streams over HTTP: every client gets the bytes of an undisturbed run."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import NAME, Served, served

TOKENS = 1200
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
STREAMS = ("audio", "sse")


@pytest.fixture(scope="module")
def server(toy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("toy") / "deployment.yaml"
    config.write_text("stages: {counter: {max_model_len: 4096}}\n")
    with served(toy_dir, "--config", str(config)) as server:
        yield server


def asked(text: str, tokens: int, **fields: Any) -> dict[str, Any]:
    sampling = {"counter": {"max_tokens": tokens, "ignore_eos": True}}
    return {"model": NAME, "input": text, "voice": "one", "seed": 1, "sampling": sampling, **fields}


def pieces(answer: httpx.Response, stream: str) -> Iterator[bytes]:
    """The pieces of a file, as a client gets them; each one of base64 decodes by itself."""
    if stream == "audio":
        yield from answer.iter_raw()
        return
    for line in answer.iter_lines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert event["type"] in ("speech.audio.delta", "speech.audio.done"), event
            if "audio" in event:
                yield base64.b64decode(event["audio"], validate=True)


def speech(server: Served, form: str, stream: str, begun: threading.Event | None = None) -> bytes:
    fields = asked(f"say it as {form}", TOKENS, response_format=form, stream_format=stream)
    with server.client() as http, http.stream("POST", "/v1/audio/speech", json=fields) as answer:
        assert answer.status_code == 200, answer.read()
        data = b""
        for piece in pieces(answer, stream):
            data += piece
            if begun is not None:
                begun.set()
        return data


@pytest.mark.nightly  # tests/orchestrator/output/test_orchestrator_files.py kills it without a server
def test_the_bytes_are_the_same_over_http(server: Served, tmp_path: Path) -> None:
    """All formats, as a file and as events, have begun when the stage before the output stage is held at a known point
    by one more request; then the output stage dies."""
    every = [(form, stream) for form in FORMATS for stream in STREAMS]
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    hold = {"stage": "tone", "at": 5, "fifo": str(fifo)}
    with ThreadPoolExecutor(len(every) + 1) as pool, server.client() as http:
        undisturbed = dict(zip(FORMATS, pool.map(lambda form: speech(server, form, "audio"), FORMATS), strict=True))
        begun = [threading.Event() for _ in every]
        running = [pool.submit(speech, server, *one, event) for one, event in zip(every, begun, strict=True)]
        for event in begun:
            assert event.wait(120), server.log()
        holder = pool.submit(http.post, "/v1/audio/speech", json=asked("hold", 50, options={"hold": hold}))
        held = os.open(fifo, os.O_WRONLY)
        fifo.unlink()
        pid = server.pid("output")
        os.kill(pid, signal.SIGKILL)
        assert not any(one.done() for one in running)
        os.close(held)
        assert [one.result() for one in running] == [undisturbed[form] for form, _ in every]
        assert holder.result().status_code == 200
    assert server.pid("output") != pid
    server.until_empty()
