"""`segue serve` on TI2V, which makes video from text and from an image: what the official client gets of either."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
from PIL import Image
from server_process import NAME, Served, served, tiny

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")

SMALL = {"num_frames": 9, "num_inference_steps": 2, "seed": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny(tmp_path_factory.mktemp("wan"), "wan", "2.2-ti2v")) as server:
        yield server


def made(client: openai.OpenAI, **more: Any) -> np.ndarray:
    """[frames, height, width, 3]"""
    size: Any = "96x64"
    job = client.videos.create_and_poll(
        model=NAME, prompt="a small boat", size=size, poll_interval_ms=100, extra_body=SMALL, **more
    )
    assert (job.status, job.progress, job.error) == ("completed", 100, None)
    with av.open(io.BytesIO(client.videos.download_content(job.id).read())) as container:
        assert container.streams.video[0].average_rate == 24
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.nightly
def test_from_text_and_from_an_image(client: openai.OpenAI, tmp_path: Path) -> None:
    """The frame that is given is the first of the video, for what the VAE makes of it."""
    Image.fromarray(np.linspace(0, 255, 64 * 96 * 3).astype(np.uint8).reshape(64, 96, 3)).save(tmp_path / "first.png")
    from_text, again = made(client), made(client)
    assert from_text.shape == (9, 64, 96, 3)
    assert np.array_equal(from_text, again), "the same seed"
    seen = made(client, input_reference=tmp_path / "first.png")
    assert seen.shape == from_text.shape
    assert np.abs(seen.astype(int) - from_text).mean() > 5
