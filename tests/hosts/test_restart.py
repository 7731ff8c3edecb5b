"""A server over two hosts that is killed and started again takes up what it had to do, with what it had."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hosts_system import Hosts, system
from safetensors import safe_open

pytestmark = pytest.mark.nightly
JOBS = str(Path(__file__).with_name("jobs_client.py"))
AWAY = {"num_cpus": 0, "resources": {"talkers": 1}, "model": "/elsewhere"}
BY_RAY = {"placement": "ray", "ray": {"address": "10.77.0.1:6379", "nodes": {"node1": AWAY}}}


def adapter(model: Path, folder: Path) -> Path:
    """A LoRA adapter of the denoiser whose effect can be seen."""
    import torch
    from safetensors.torch import save_file

    layer = "blocks.0.attn1.to_q"
    [file] = (model / "transformer").glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        rows, columns = weights.get_slice(f"{layer}.weight").get_shape()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"transformer.{layer}.lora_A.weight": torch.randn(4, columns, generator=generator) / columns**0.5,
        f"transformer.{layer}.lora_B.weight": 4 * torch.randn(rows, 4, generator=generator),
    }
    folder.mkdir()
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")
    return folder


def begin(running: Hosts, model: str, steps: int = 6) -> str:
    """Return the id of a video that is being made."""
    with running.hosts["server"].start(JOBS, running.url, "begin", model, str(steps)) as client:
        assert client.stdout is not None
        return client.stdout.read()


def frames(running: Hosts, video: str) -> np.ndarray:
    """[frames, height, width, 3] int."""
    with running.hosts["server"].start(JOBS, running.url, "end", video) as client:
        assert client.stdout is not None
        ended = json.loads(client.stdout.read())
    assert ended["status"] == "completed", (ended["error"], running.all_logs())
    with av.open(io.BytesIO(base64.b64decode(ended["file"]))) as file:
        return np.stack([frame.to_ndarray(format="rgb24").astype(int) for frame in file.decode(video=0)])


@pytest.mark.parametrize("ray", [False, pytest.param(True, marks=pytest.mark.needs("ray"))], ids=["joined", "ray"])
def test_a_restarted_server_takes_up_video_jobs_and_adapters(tmp_path: Path, ray: bool) -> None:
    """It is killed while a video is made, by an adapter, on the other host. Nothing that it started is left."""
    from segue.models.images.wan import tiny

    model = tmp_path / "model"
    tiny.make(model)
    (tmp_path / "videos").mkdir()
    shared = {adapter(model, tmp_path / "poet"): "/poet", tmp_path / "videos": "/videos"}
    words = ("--lora", "poet=/poet", "--video-dir", "/videos")
    where: dict[str, Any] = {"stages": {"denoiser": {"node": "node1", "threads": 1}}, **(BY_RAY if ray else {})}
    (logs := tmp_path / "logs").mkdir()
    with system(2, model, where, logs, ray=ray, shared=shared, words=words) as running:
        right = frames(running, begin(running, "poet"))
        assert np.abs(right - frames(running, begin(running, "tiny"))).mean() > 1, "the adapter shows"
        half = begin(running, "poet", steps=60)
        running.kill_server()
        running.serve()
        running.wait("is served at", 2)
        taken = frames(running, half)
        assert np.array_equal(taken, frames(running, begin(running, "poet", steps=60)))
        assert np.array_equal(right, frames(running, begin(running, "poet")))
