"""Servers of videos, and what their clients ask of them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
from fake_service import FakeService, Live, live
from filmer import filmer

from segue.server.settings import ServerSettings

URL = "/v1/videos"


@contextmanager
def serving(directory: Path, service: FakeService | None = None, **settings: Any) -> Iterator[Live]:
    with live(service or filmer(), ServerSettings(drain_seconds=1, video_dir=directory, **settings)) as server:
        yield server


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=120)


def created(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(URL, json={"model": "filmer", "prompt": "a boat", "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(http: httpx.Client, video_id: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask how it stands until it is so."""
    end = time.monotonic() + 240
    while not true(video := http.get(f"{URL}/{video_id}").json()):
        assert time.monotonic() < end, video
        time.sleep(0.01)
    return video


def ended(http: httpx.Client, video_id: str) -> dict[str, Any]:
    return until(http, video_id, lambda video: video["status"] in ("completed", "failed"))


def decoded(data: bytes) -> tuple[np.ndarray, float]:
    """([frames, height, width, 3] int, frames per second)."""
    with av.open(io.BytesIO(data)) as file:
        [stream] = file.streams
        assert isinstance(stream, av.VideoStream)
        assert stream.codec_context.name == "h264"
        rate = stream.average_rate
        shown = [frame.to_ndarray(format="rgb24").astype(int) for frame in file.decode(stream)]
    assert rate is not None
    return np.stack(shown), float(rate)


def content(http: httpx.Client, video_id: str) -> np.ndarray:
    answer = http.get(f"{URL}/{video_id}/content")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
    return decoded(answer.content)[0]


@contextmanager
def process(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(a server in a process of its own, its URL)."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, str(here / "video_script.py"), str(directory)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()
