"""A model that makes images, whole: from Python, streamed, cancelled, and with its workers killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from truth_system import System

from segue.messages.deltas import Delta, Finished, ImageDelta, ProgressDelta
from segue.messages.errors import InvalidRequest
from segue.orchestrator.omni.outputs import RequestOutput

ASKED: dict[str, Any] = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey",
    "height": 64,
    "width": 64,
    "num_inference_steps": 6,
    "num_images_per_prompt": 2,
    "seed": 3,
    "progress": True,
    "partial_images": 2,
}


@pytest.fixture(scope="module")
def painter(qwen_image_dir: Path) -> Iterator[System]:
    painter = System(qwen_image_dir)
    yield painter
    painter.close()


@pytest.fixture(scope="module")
def truth(painter: System) -> RequestOutput:
    output, _ = painter.run(painter.observe(ASKED))
    return output


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """Sums are rounded in another order in another batch: one level of 255."""
    assert len(one.images) == len(other.images) == 2
    for mine, yours in zip(one.images, other.images, strict=True):
        assert np.abs(np.asarray(mine).astype(int) - np.asarray(yours).astype(int)).max() <= 1


def check_deltas(deltas: list[Delta]) -> None:
    """Everything once: each step of each image in order, its previews, and the image."""
    assert isinstance(deltas[-1], Finished)
    for index in (0, 1):
        steps = [delta.step for delta in deltas if isinstance(delta, ProgressDelta) and delta.index == index]
        assert steps == [1, 2, 3, 4, 5, 6]
        images = [delta for delta in deltas if isinstance(delta, ImageDelta) and delta.index == index]
        assert [delta.partial for delta in images if delta.partial is not None] in ([0, 1], [0], [1], [])
        assert [(delta.height, delta.width) for delta in images if delta.partial is None] == [(64, 64)]
        assert all((delta.height, delta.width) == (32, 32) for delta in images if delta.partial is not None)


def test_streamed(painter: System, truth: RequestOutput) -> None:
    output, deltas = painter.run(painter.observe(ASKED))
    assert_same(output, truth)
    check_deltas(deltas)
    assert sum(isinstance(delta, ImageDelta) for delta in deltas) == 6, "two images, two previews of each"
    assert output.metrics.attempts == 1


def test_bare_text_is_a_prompt_and_arguments_are_those_of_the_pipeline(painter: System, truth: RequestOutput) -> None:
    prompt, settings = ASKED["prompt"], {key: ASKED[key] for key in ASKED if key != "prompt"}
    output = painter.run(painter.omni.generate(prompt, **settings))
    assert_same(output, truth)
    other = painter.run(painter.omni.generate(prompt, **{**settings, "seed": 4}))
    assert np.abs(np.asarray(other.images[0]).astype(int) - np.asarray(truth.images[0]).astype(int)).mean() > 5


@pytest.mark.parametrize("stage", ["denoiser", "decoder", "text_encoder"])
def test_killed_while_it_denoises(painter: System, truth: RequestOutput, stage: str) -> None:
    """The same images, and nothing twice; so for one that shares the steps."""
    attempts = 1 if stage == "text_encoder" else 2

    async def both() -> list[int]:
        denoising: set[str] = set()
        killed = []

        def kill(who: str, delta: Delta) -> None:
            if isinstance(delta, ProgressDelta):
                denoising.add(who)
                if len(denoising) == 2 and delta.step >= 3 and not killed:
                    killed.append(delta)
                    painter.kill(stage)

        found = await asyncio.gather(*(painter.observe(ASKED, partial(kill, who)) for who in ("one", "other")))
        for output, deltas in found:
            assert_same(output, truth)
            check_deltas(deltas)
        assert killed
        return [output.metrics.attempts for output, _ in found]

    assert painter.in_time(both, lambda found: found == [attempts, attempts]) == [attempts, attempts]


def test_cancelled(painter: System, truth: RequestOutput) -> None:
    """Leaving the stream frees every stage; who stays gets what it gets alone."""

    async def leave() -> None:
        async with aclosing(painter.omni.stream(painter.omni.request({**ASKED, "num_inference_steps": 200}))) as deltas:
            async for delta in deltas:
                if isinstance(delta, ProgressDelta):
                    return

    async def body() -> tuple[RequestOutput, list[Delta]]:
        stays = asyncio.create_task(painter.observe(ASKED))
        await leave()
        return await stays

    output, deltas = painter.run(body())
    assert_same(output, truth)
    check_deltas(deltas)
    assert not painter.omni.orchestrator.requests


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"height": 65}, "height"),
        ({"num_frames": 9}, "num_frames"),
        ({"image": [np.zeros((8, 8, 3), dtype=np.uint8)] * 2}, "image"),
        ({"mask_image": np.zeros((8, 8, 3), dtype=np.uint8)}, "mask_image"),
        ({"heigth": 64}, "heigth"),
        ({"num_inference_steps": "many"}, "num_inference_steps"),
        ({"image": 7}, "image"),
    ],
)
def test_refused(painter: System, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        painter.run(painter.omni.generate({**ASKED, **wrong}))
    assert field in str(caught.value.field)
