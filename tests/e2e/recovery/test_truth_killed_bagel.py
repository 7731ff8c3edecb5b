"""BAGEL's images through the whole system are those of the public reference, also after kill -9 of the worker that
thinks, reads and draws."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from server_process import tiny
from truth_system import System

from segue.messages.deltas import Delta, ProgressDelta, TextDelta
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.outputs import RequestOutput

GOLDEN = Path(__file__).parents[2] / "models" / "omni" / "bagel" / "golden"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
TEXTS = 39
"""Most tokens of each text of a story."""
EVERY = 11
"""Of the numbers of an image, those that are recorded."""


def picture(width: int, height: int) -> np.ndarray:
    """As `make_golden.py` has it."""
    across, down = np.arange(width), np.arange(height)[:, None]
    channels = [(3 * across + down) % 256, (across + 5 * down) % 256, (across * down) % 256]
    return np.stack(channels, -1).astype(np.uint8)


def prompt(name: str) -> dict[str, Any]:
    case = CASES[name]
    guidance = case["guidance"]
    content: list[Any] = [{"type": "text", "text": case["text"]}]
    if "image" in case:
        content.insert(0, {"type": "image", "image": picture(*case["image"])})
    messages: list[Any] = [{"role": "user", "content": content}]
    if "think" in case:
        messages.insert(0, {"role": "system", "content": case["think"]})
    asked = {"height": case["size"][0], "width": case["size"][1]} if "size" in case else {}
    return {
        "messages": messages,
        "modalities": ["text", "image"] if "think" in case or "images" in case else ["image"],
        "num_inference_steps": case["steps"],
        "guidance_scale": guidance["text"],
        "progress": True,
        "seed": case["seed"],
        "sampling": {"llm": SamplingParams(max_tokens=TEXTS if "images" in case else 60)},
        "options": {
            "cfg_img_scale": guidance["image"],
            "cfg_interval": [guidance["above"], guidance["upto"]],
            "cfg_renorm_type": guidance["renorm"],
            "cfg_renorm_min": guidance["least"],
            **({"interleave": case["images"]} if "images" in case else {}),
        },
        **asked,
    }


def check(output: RequestOutput, name: str) -> None:
    if "images" in CASES[name]:
        check_story(output, name)
        return
    [image] = output.images
    check_image(image, f"{name}.pixels")
    thoughts = json.loads((GOLDEN / "golden.json").read_text())["thoughts"].get(name)
    if thoughts is not None:
        assert output.text == thoughts


def check_story(output: RequestOutput, name: str) -> None:
    """All texts and images; the ids of each text, with its end if it was not cut."""
    texts = [load_file(GOLDEN / "golden.safetensors")[f"{name}.ids.{number}"].tolist()[1:] for number in range(3)]
    left = list(output.token_ids["llm"])
    for text in texts:
        assert left[: len(text)] == text
        left = left[len(text) + (len(text) < TEXTS) :]
    assert not left
    assert len(output.images) == CASES[name]["images"]
    for number, image in enumerate(output.images):
        check_image(image, f"{name}.pixels.{number}")


def check_image(image: Image.Image, recorded_as: str) -> None:
    ours = np.asarray(image).astype(np.int64).transpose(2, 0, 1).reshape(-1)[::EVERY]
    recorded = load_file(GOLDEN / "golden.safetensors")[recorded_as]
    gold = np.round((recorded / 2 + 0.5).clip(0, 1) * 255).astype(np.int64)
    assert np.abs(ours - gold).max() <= 1
    assert len(set(gold.tolist())) > 50


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tiny(tmp_path_factory.mktemp("bagel") / "tiny", "bagel"))
    yield system
    system.close()


def test_all_at_once(system: System) -> None:
    names = ("draw", "edit", "think", "story", "story")
    for output, name in zip(system.ask(*map(prompt, names)), names, strict=True):
        check(output, name)


@pytest.mark.parametrize(
    ("name", "kind", "when"),
    [
        pytest.param("think", TextDelta, 5, marks=pytest.mark.nightly),
        pytest.param("edit", ProgressDelta, 2, marks=pytest.mark.nightly),
        pytest.param("think", ProgressDelta, 2, marks=pytest.mark.nightly),
        pytest.param("draw", ProgressDelta, 6, marks=pytest.mark.nightly),
        pytest.param("story", TextDelta, 5, marks=pytest.mark.nightly),
        pytest.param("story", ProgressDelta, 2, marks=pytest.mark.nightly),
        pytest.param("story", ProgressDelta, 3, marks=pytest.mark.nightly),
        ("story", ProgressDelta, 5),
        pytest.param("story", TextDelta, 43, marks=pytest.mark.nightly),
    ],
)
def test_killed_at_work(system: System, name: str, kind: type[Delta], when: int) -> None:
    """While it writes what it thinks, and between two steps of an image; another request goes on beside it."""

    async def body() -> RequestOutput:
        heard = 0

        def kill(delta: Delta) -> None:
            nonlocal heard
            heard += isinstance(delta, kind)
            if heard == when and isinstance(delta, kind):
                system.kill("denoiser")

        output, other = await asyncio.gather(system.collect(prompt(name), kill), system.collect(prompt("draw")))
        check(output, name)
        check(other, "draw")
        return output

    output = system.in_time(body, lambda output: output.metrics.attempts > 1)
    assert output.metrics.attempts == 2
