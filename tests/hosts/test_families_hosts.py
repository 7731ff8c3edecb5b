"""Qwen3-Omni and Qwen-Image over two hosts answer as on one, also while workers are killed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts_system import Hosts, system
from mixed_requests import Clients, assert_equal
from PIL import Image

pytestmark = pytest.mark.nightly
IMAGES = str(Path(__file__).with_name("images_client.py"))
COUNT = 8
TCP = {"runtime": {"connectors": {"tcp": {"name": "TcpConnector", "extra": {"inline_threshold_bytes": 0}}}}}
AWAY = {"node": "node1"}
TWICE = {"node": ["node1", "server"], "replicas": 2}
Images = dict[int, np.ndarray]
"""Number of the request → [height, width, 3] int."""


def deployment(**stages: Any) -> dict[str, Any]:
    return {"defaults": {"threads": 1}, "stages": stages, **(TCP if stages else {})}


def images(running: Hosts, disturb: Callable[[], None] | None = None) -> Images:
    """Ask for all images at once. `disturb`: what happens when the first is there."""
    found: Images = {}
    with running.hosts["server"].start(IMAGES, running.url, str(COUNT)) as client:
        assert client.stdout is not None
        for line in client.stdout:
            said = json.loads(line)
            assert "error" not in said, (said["error"], running.all_logs())
            image = Image.open(io.BytesIO(base64.b64decode(said["png"])))
            found[said["number"]] = np.asarray(image.convert("RGB")).astype(int)
            if len(found) == 1 and disturb is not None:
                disturb()
    assert len(found) == COUNT
    return found


def kill(running: Hosts, stage: str, host: str = "node1") -> None:
    workers = running.processes(host)
    workers[next(name for name in workers if name.startswith(f"segue-{stage}"))].kill()


def test_qwen3_omni_over_two_hosts_answers_as_on_one(tmp_path: Path) -> None:
    """The talker and the vocoder elsewhere; then every stage on both hosts, while one worker of each is killed."""
    from segue.models.omni.qwen3_omni.tiny import presets as tiny

    tiny.make(tmp_path / "model")
    stages = ("thinker", "talker", "vocoder")
    laid = {
        "one": deployment(),
        "two": deployment(talker=AWAY, vocoder=AWAY),
        "both": deployment(**dict.fromkeys(stages, TWICE)),
    }
    found = {}
    for name, where in laid.items():
        (logs := tmp_path / name).mkdir()
        with system(1 if name == "one" else 2, tmp_path / "model", where, logs) as running:
            if name == "both":
                for stage in stages:
                    running.wait(rf"{stage}\.0-1 \(node1\) is ready")
            clients = Clients(running)
            if name == "both":
                for stage in stages:
                    clients.until_begun(2)
                    kill(running, stage)
            found[name] = clients.answers()
    assert all((number % 2 == 1) == (len(one.samples) > 1000) for number, one in found["one"].items())
    assert len({one.text for one in found["one"].values()}) > len(found["one"]) / 2
    assert_equal(found["two"], found["one"])
    assert_equal(found["both"], found["one"])


def test_qwen_image_over_two_hosts_makes_the_images_of_one(qwen_image_dir: Path, tmp_path: Path) -> None:
    """The denoiser elsewhere; then on both hosts, while the other host's is killed."""
    laid = {
        "one": deployment(),
        "two": deployment(denoiser=AWAY),
        "both": deployment(denoiser=TWICE, text_encoder=AWAY),
    }
    found = {}
    for name, where in laid.items():
        (logs := tmp_path / name).mkdir()
        with system(1 if name == "one" else 2, qwen_image_dir, where, logs) as running:
            disturb = None
            if name == "both":
                running.wait(r"denoiser\.0-1 \(node1\) is ready")
                disturb = partial(kill, running, "denoiser")
            found[name] = images(running, disturb)
    assert found["one"].keys() == found["two"].keys() == found["both"].keys()
    shapes = {one.shape for one in found["one"].values()}
    assert shapes == {(64, 64, 3), (96, 64, 3)}
    assert all(one.std() > 5 for one in found["one"].values()), "they are not grey"
    assert np.abs(found["one"][0] - found["one"][2]).mean() > 5, "nor equal"
    for name in ("two", "both"):
        for number, image in found["one"].items():
            assert np.abs(found[name][number] - image).max() <= 1, (name, number)
