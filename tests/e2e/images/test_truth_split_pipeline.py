"""A pipeline that diffusers' modular blocks take apart, its stages in processes of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from segue.messages.errors import InvalidRequest
from segue.orchestrator.omni.async_omni import AsyncOmni
from tiny_pipelines import ernie

STAGES = ("library_text_encoder", "library_denoiser", "library_decoder")
ASKED: dict[str, Any] = {
    "prompt": "a small boat left the harbour",
    "negative_prompt": "grey",
    "guidance_scale": 3.0,
    "height": 64,
    "width": 48,
    "num_inference_steps": 3,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ernie")
    with torch.random.fork_rng(devices=[]):
        ernie(made)
    return made


def levels_apart(ours: Any, theirs: np.ndarray) -> int:
    """Of 256; `theirs` are in [0, 1]."""
    return int(np.abs(np.asarray(ours).astype(int) - (theirs * 255).round().astype(int)).max())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
def test_its_images_are_the_pipeline_s(directory: Path) -> None:
    """Alone and beside others."""
    pipeline = diffusers.ErnieImagePipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)

    def wanted(seed: int, **other: Any) -> list[np.ndarray]:
        generator = torch.Generator().manual_seed(seed)
        return list(pipeline(**{**ASKED, **other}, generator=generator, output_type="np").images)

    theirs = [wanted(3), wanted(4, prompt="seven brothers", num_images_per_prompt=2)]
    assert theirs[0][0].std() > 0.02, "not grey"

    async def body() -> None:
        omni = AsyncOmni(directory)
        await omni.start()
        try:
            workers = omni.health().stages
            assert len({workers[stage].replicas[0].pid for stage in STAGES}) == len(STAGES)
            two = {"prompt": "seven brothers", "num_images_per_prompt": 2, "seed": 4}
            for asked in ([{"seed": 3}], [{"seed": 3}, two, {"seed": 8}]):
                made = await asyncio.gather(*(omni.generate({**ASKED, **one}) for one in asked))
                for answer, expected in zip(made, theirs, strict=False):
                    assert len(answer.images) == len(expected)
                    for mine, yours in zip(answer.images, expected, strict=True):
                        assert levels_apart(mine, yours) <= 1
            assert levels_apart(made[2].images[0], theirs[0][0]) > 1, "another seed, another image"
            with pytest.raises(InvalidRequest, match="did you mean 'negative_prompt'"):
                await omni.generate({**ASKED, "negative_promt": "grey"})
        finally:
            await omni.stop()

    asyncio.run(body())
