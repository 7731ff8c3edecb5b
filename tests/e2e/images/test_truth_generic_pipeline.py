"""A pipeline that no family names, served whole: its own arguments at the door, cancelled between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import openai
import pytest
import torch
from server_process import NAME, served

from segue.messages.deltas import ProgressDelta
from segue.messages.errors import InvalidRequest
from segue.orchestrator.omni.async_omni import AsyncOmni
from tiny_pipelines import stable_diffusion

ASKED: dict[str, Any] = {
    "prompt": "a small boat",
    "negative_prompt": "grey",
    "height": 64,
    "width": 64,
    "num_inference_steps": 4,
    "num_images_per_prompt": 2,
    "seed": 3,
    "progress": True,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stable-diffusion")
    with torch.random.fork_rng(devices=[]):
        stable_diffusion(made)
    return made


@pytest.fixture(scope="module")
def running(directory: Path) -> Iterator[tuple[asyncio.AbstractEventLoop, AsyncOmni]]:
    loop, omni = asyncio.new_event_loop(), AsyncOmni(directory)
    loop.run_until_complete(omni.start())
    yield loop, omni
    loop.run_until_complete(omni.stop())
    loop.close()


@pytest.mark.nightly
def test_its_own_arguments_and_its_own_images(
    directory: Path, running: tuple[asyncio.AbstractEventLoop, AsyncOmni]
) -> None:
    loop, omni = running
    asked = {**ASKED, "cross_attention_kwargs": {}}
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(directory)
    given = {key: value for key, value in asked.items() if key not in ("seed", "progress")}
    theirs = pipeline(**given, generator=torch.Generator().manual_seed(3), output_type="np").images
    ours = loop.run_until_complete(omni.generate(asked)).images
    for mine, wanted in zip(ours, theirs, strict=True):
        assert np.abs(np.asarray(mine).astype(int) - (wanted * 255).round().astype(int)).max() <= 1
    with pytest.raises(InvalidRequest, match="did you mean 'cross_attention_kwargs'"):
        loop.run_until_complete(omni.generate({**ASKED, "cross_atention_kwargs": {}}))


def test_cancelled(running: tuple[asyncio.AbstractEventLoop, AsyncOmni]) -> None:
    """A request of 200 steps is left at its second, and the next one has its turn."""
    loop, omni = running

    async def body() -> list[int]:
        async with aclosing(omni.stream(omni.request({**ASKED, "num_inference_steps": 200}))) as deltas:
            async for delta in deltas:
                if isinstance(delta, ProgressDelta) and delta.step == 2:
                    break
        async with aclosing(omni.stream(omni.request(ASKED))) as deltas:
            return [delta.step async for delta in deltas if isinstance(delta, ProgressDelta)]

    assert loop.run_until_complete(body()) == [1, 2, 3, 4]
    assert not omni.orchestrator.requests


@pytest.mark.nightly
def test_over_http(directory: Path) -> None:
    """Its own arguments in `pipeline_arguments`; those that it does not have are named."""
    asked: dict[str, Any] = {"model": NAME, "prompt": "a small boat", "size": "64x64"}
    few = {"num_inference_steps": 3, "seed": 3, "scheduler": "EulerDiscreteScheduler"}
    with served(directory) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        made = []
        for arguments in ({}, {"cross_attention_kwargs": {}}, {"timesteps": [801, 501, 1]}):
            answer = client.images.generate(**asked, extra_body={**few, "pipeline_arguments": arguments})
            assert answer.data is not None
            made.append(answer.data[0].b64_json)
        assert made[0] == made[1] != made[2]
        for name, says in (
            ("timestep", "did you mean 'timesteps'"),
            ("callback", "takes no 'callback'"),
            ("num_inference_steps", "a parameter of the request: write it"),
        ):
            with pytest.raises(openai.BadRequestError, match=says) as caught:
                client.images.generate(**asked, extra_body={**few, "pipeline_arguments": {name: 1}})
            assert caught.value.param == f"pipeline_arguments.{name}"
