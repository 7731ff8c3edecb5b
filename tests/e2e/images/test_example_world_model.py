"""The example of a model that no library has: served as its author would, it makes what its author's own loop makes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from server_process import segue, served

from segue import Omni
from segue.messages.errors import InvalidRequest
from segue.models.registry import tiny_preset

EXAMPLE = Path(__file__).parents[3] / "examples" / "world_model"
SHAPE: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 5}


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `pip install` makes of the example, here and in the processes that are started."""
    at = tmp_path_factory.mktemp("installed")
    (at / "segue_world").symlink_to(EXAMPLE / "segue_world")
    info = at / "segue_world-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: segue-world\nVersion: 1\n")
    points = "[segue.models]\nworld = segue_world.family:FAMILY\n"
    assert 'world = "segue_world.family:FAMILY"' in (EXAMPLE / "pyproject.toml").read_text()
    (info / "entry_points.txt").write_text(points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(at))
        patch.setenv("PYTHONPATH", str(at), prepend=os.pathsep)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "segue_world"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model(package: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("world")
    tiny_preset("world").make(directory, "tiny", 0)
    return directory


def actions(seed: int, frames: int) -> list[list[float]]:
    return np.random.default_rng(seed).normal(size=(frames, 3)).round(3).tolist()


def expected(model: Path, asked: list[list[float]], seed: int) -> np.ndarray:
    """[frames, height, width, 3] in [0, 1], by the author's own loop."""
    from segue_world.networks import Frames, World, sample

    world, frames = World(), Frames()
    world.load_state_dict(load_file(model / "transformer" / "model.safetensors"))
    frames.load_state_dict(load_file(model / "vae" / "model.safetensors"))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model / "scheduler")
    steps = SHAPE["num_inference_steps"]
    told = torch.tensor(asked)
    return sample(world, frames, scheduler, told, height=32, width=48, steps=steps, seed=seed).numpy()


@pytest.mark.nightly
def test_requests_of_many_lengths_at_once(model: Path) -> None:
    """Each gets the video that it gets alone, and other actions give another one."""
    asked = [actions(0, 5), actions(1, 5), actions(2, 9), actions(3, 5)]
    with Omni(model, progress=False) as omni:
        assert omni.card.family == "world"
        prompts = [{"prompt": "", "options": {"actions": rows}, "seed": 7} for rows in asked]
        made = [output.videos[0] for output in omni.generate(prompts, **SHAPE)]
        with pytest.raises(InvalidRequest, match=r"options.actions must be a list with 3 numbers for each frame"):
            omni.generate("", options={"actions": [[1, 2]]})
        with pytest.raises(InvalidRequest, match=r"options\.actions are of 5 frames"):
            omni.generate("", options={"actions": asked[0]}, num_frames=9)
    for rows, video in zip(asked, made, strict=True):
        assert video.fps == 8
        np.testing.assert_allclose(video.frames / 255, expected(model, rows, 7), atol=0.5 / 255 + 1e-4)
    apart = np.abs(made[0].frames.astype(int) - made[1].frames.astype(int))
    assert apart.mean() > 2


def test_actions_over_http(model: Path, tmp_path: Path) -> None:
    with served(model, "--video-dir", str(tmp_path)) as server, server.client() as http:
        body = {"prompt": "", "size": "48x32", "options": {"actions": actions(0, 5)}, "num_inference_steps": 3}
        job = http.post("/v1/videos", json=body).json()
        assert job["status"] in ("queued", "in_progress"), job
        while job["status"] != "completed":
            assert job["status"] != "failed", job
            job = http.get(f"/v1/videos/{job['id']}").json()
        file = http.get(f"/v1/videos/{job['id']}/content")
        assert file.content[4:8] == b"ftyp"
        wrong = http.post("/v1/videos", json={**body, "options": {"actions": "left"}})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "options.actions")


@pytest.mark.nightly
def test_a_weight_that_is_missing_is_named(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    path = broken / "transformer" / "model.safetensors"
    weights = load_file(path)
    del weights["time.bias"]
    save_file(weights, path)
    done = segue("generate", str(broken), "", "-o", str(tmp_path / "out.mp4"), "--option", "actions=[[0, 0, 0]]")
    assert done.returncode == 2
    assert "no tensor 'time.bias' in the checkpoint" in done.stderr


@pytest.mark.nightly
def test_a_key_that_only_diffusers_has(model: Path, tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text("stages: {denoiser: {attention: native}}")
    config = ["--config", str(tmp_path / "deployment.yaml")]
    done = segue("generate", str(model), "", "-o", str(tmp_path / "out.mp4"), *config)
    assert "attention is set, but World is not a diffusers model" in done.stderr


@pytest.mark.nightly
def test_from_the_command_line(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    asked = f"actions={actions(0, 5)}"
    done = segue("generate", str(model), "", "--size", "48x32", "--steps", "2", "--option", asked, "-o", str(out))
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert out.stat().st_size > 500


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    info = tmp_path / "someones-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones\nVersion: 1\n")
    for point, said in (
        ("nowhere.family:FAMILY", "ModuleNotFoundError"),
        ("json:dumps", "must be a segue.models.family"),
    ):
        (info / "entry_points.txt").write_text(f"[segue.models]\nmine = {point}\n")
        paths = os.pathsep.join([str(tmp_path), str(EXAMPLE.parents[1] / "src")])
        done = segue("tiny", "world", str(tmp_path / "x"), PYTHONPATH=paths)
        assert done.returncode == 2
        assert f"the entry point mine = '{point}' (segue.models) of the package 'someones'" in done.stderr
        assert said in done.stderr


@pytest.mark.nightly
def test_a_stage_without_an_adapter_is_named(model: Path, tmp_path: Path) -> None:
    """Of a package that forgot one."""
    package = shutil.copytree(EXAMPLE / "segue_world", tmp_path / "segue_world")
    stages = package / "stages.py"
    stages.write_text(stages.read_text().replace(', "decoder": WorldDecoder', ""))
    info = tmp_path / "segue_world-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: segue-world\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[segue.models]\nworld = segue_world.family:FAMILY\n")
    paths = os.pathsep.join([str(tmp_path), str(EXAMPLE.parents[1] / "src")])
    done = segue("generate", str(model), "", "-o", str(tmp_path / "out.mp4"), PYTHONPATH=paths)
    assert (
        "segue_world.stages.STAGE_MODELS has no 'decoder', which is in the graph of the family 'world'" in done.stderr
    )
