"""Schedulers of another kind than the checkpoint's, along its flow: what the pipeline makes with the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of, quiet

from segue.messages.errors import InvalidRequest
from segue.models.flux import tiny as flux
from segue.models.qwen_image import tiny as qwen_image
from segue.models.stable_diffusion_3 import tiny as stable_diffusion_3
from segue.models.wan import tiny as wan

PLAIN = {"prompt": "a red bicycle", "height": 64, "width": 64, "num_inference_steps": 5, "seed": 4}
VIDEO = {**PLAIN, "num_frames": 5, "guidance_scale": 3.0}
SOLVERS = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
ALONG_A_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "FluxPipeline": (flux.make, PLAIN, SOLVERS, ALONG_A_FLOW),
    "QwenImagePipeline": (qwen_image.make, PLAIN, SOLVERS, ALONG_A_FLOW),
    "StableDiffusion3Pipeline": (stable_diffusion_3.make, PLAIN, SOLVERS, {**ALONG_A_FLOW, "flow_shift": 3.0}),
    "WanPipeline": (wan.make, VIDEO, ("FlowMatchEulerDiscreteScheduler",), {"shift": 3.0}),
}
"""Maker, request, schedulers, and how a user of the pipeline makes them of the checkpoint's settings."""


class SpacedByItself(diffusers.DPMSolverMultistepScheduler):
    """For a pipeline that always gives noise levels, which this one does not take."""

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, mu: Any = None, sigmas: Any = None
    ) -> None:
        steps = num_inference_steps if sigmas is None else len(sigmas)
        super().set_timesteps(steps, device, mu=mu)


def theirs_of(name: str) -> type:
    """The class that the pipeline is given."""
    return SpacedByItself if name == "DPMSolverMultistepScheduler" else getattr(diffusers, name)  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(kind)
    KINDS[kind][0](directory)
    return directory


@pytest.fixture(scope="module")
def chain(directory: Path) -> Chain:
    return Chain(directory)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # the library and NumPy 2
def test_what_the_pipeline_makes(kind: str, directory: Path, chain: Chain) -> None:
    """Beside a request with the checkpoint's own, in one batch, and joined late."""
    _, asked, names, settings = KINDS[kind]
    pipeline = pipeline_of(directory, kind)
    own = pipeline.scheduler.config
    theirs = [expected(pipeline, asked)]
    for name in names:
        with quiet():
            pipeline.scheduler = theirs_of(name).from_config(own, **settings)
        theirs.append(expected(pipeline, asked))
    made = chain.run(asked, *({**asked, "scheduler": name} for name in names), late={1: 2})
    for one, other in zip(made, theirs, strict=True):
        assert apart(one, other) < WITHIN
    for one in made[1:]:
        assert apart(one, theirs[0]) > WITHIN, "it is not the checkpoint's own"


def test_noise_levels_that_would_not_be_taken(kind: str, chain: Chain) -> None:
    _, asked, names, _ = KINDS[kind]
    if kind == "WanPipeline":  # which takes none at all
        return
    levels = {name: value for name, value in asked.items() if name != "num_inference_steps"} | {"sigmas": [1.0, 0.5]}
    assert chain.run(levels)[0].pixels
    with pytest.raises(InvalidRequest, match="spaces the noise levels itself") as caught:
        chain.run({**levels, "scheduler": names[0]})
    assert caught.value.field == "sigmas"
