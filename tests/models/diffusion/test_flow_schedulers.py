"""Schedulers of another kind than the checkpoint's, along its flow: what the pipeline makes with the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of, quiet

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.flux import tiny as flux
from segue.models.images.qwen_image import tiny as qwen_image
from segue.models.images.stable_diffusion_3 import tiny as stable_diffusion_3
from segue.models.images.wan import tiny as wan
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers, set_shifted
from segue.models.shared.diffusion.tiny import write_index
from segue.models.shared.tiny.files import write_json

PLAIN = {"prompt": "a red bicycle", "height": 64, "width": 64, "num_inference_steps": 5, "seed": 4}
VIDEO = {**PLAIN, "num_frames": 5, "guidance_scale": 3.0}
SOLVERS = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
ALONG_A_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
HEUN, LCM = "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"
KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "FluxPipeline": (flux.make, PLAIN, {**dict.fromkeys(SOLVERS, ALONG_A_FLOW), LCM: {}}),
    "QwenImagePipeline": (qwen_image.make, PLAIN, {**dict.fromkeys(SOLVERS, ALONG_A_FLOW), LCM: {}}),
    "StableDiffusion3Pipeline": (
        stable_diffusion_3.make,
        PLAIN,
        {**{name: {**ALONG_A_FLOW, "flow_shift": 3.0} for name in SOLVERS}, LCM: {}, HEUN: {}},
    ),
    "WanPipeline": (
        wan.make,
        VIDEO,
        {name: {"shift": 3.0} for name in ("FlowMatchEulerDiscreteScheduler", HEUN, LCM)},
    ),
}
"""Maker, request, and by scheduler how a user of the pipeline makes it of the checkpoint's settings."""


class SpacedByItself(diffusers.DPMSolverMultistepScheduler):
    """For a pipeline that always gives noise levels, which this one does not take."""

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, mu: Any = None, sigmas: Any = None
    ) -> None:
        steps = num_inference_steps if sigmas is None else len(sigmas)
        super().set_timesteps(steps, device, mu=mu)


class OfTheSeed(diffusers.FlowMatchLCMScheduler):
    """For pipelines that let it draw from the generator of the whole process: from that of the request, behind the
    noise that it began with."""

    generator: torch.Generator | None = None

    def step(self, model_output: Any, timestep: Any, sample: Any, **others: Any) -> Any:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(PLAIN["seed"])
            torch.randn(sample.shape, generator=self.generator)
        return super().step(model_output, timestep, sample, generator=self.generator, **others)


SUBCLASSES: dict[str, type] = {"DPMSolverMultistepScheduler": SpacedByItself, LCM: OfTheSeed}


def theirs_of(name: str) -> type:
    """The class that the pipeline is given."""
    return SUBCLASSES.get(name) or getattr(diffusers, name)  # type: ignore[no-any-return]


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
    _, plain, settings = KINDS[kind]
    pipeline = pipeline_of(directory, kind)
    own = pipeline.scheduler.config
    asked, theirs = [plain], [expected(pipeline, plain)]
    for name, told in settings.items():
        with quiet():
            pipeline.scheduler = theirs_of(name).from_config(own, **told)
        # Heun's makes two calls a step, and small random networks blow up what differs by rounding
        steps = 3 if name == HEUN else plain["num_inference_steps"]
        asked.append({**plain, "scheduler": name, "num_inference_steps": steps})
        theirs.append(expected(pipeline, asked[-1]))
    made = chain.run(*asked, late={1: 2, 3: 1})
    for one, other in zip(made, theirs, strict=True):
        assert apart(one, other) < WITHIN
    for one in made[1:]:
        assert apart(one, theirs[0]) > WITHIN, "it is not the checkpoint's own"


def test_noise_levels_that_would_not_be_taken(kind: str, chain: Chain) -> None:
    _, asked, _ = KINDS[kind]
    if kind == "WanPipeline":  # which takes none at all
        return
    levels = {name: value for name, value in asked.items() if name != "num_inference_steps"} | {"sigmas": [1.0, 0.5]}
    assert chain.run(levels)[0].pixels
    with pytest.raises(InvalidRequest, match="computes the noise levels itself") as caught:
        chain.run({**levels, "scheduler": SOLVERS[0]})
    assert caught.value.field == "sigmas"


def test_one_that_takes_no_noise_levels_where_they_are_spaced_for_it(kind: str, directory: Path, chain: Chain) -> None:
    _, asked, settings = KINDS[kind]
    if HEUN in settings:
        with pytest.raises(InvalidRequest, match="sigmas") as caught:
            chain.run({**asked, "scheduler": HEUN, "sigmas": [1.0, 0.5], "num_inference_steps": None})
        assert caught.value.field == "sigmas"
        return
    with pytest.raises(InvalidRequest, match="Heun") as caught:
        chain.run({**asked, "scheduler": HEUN})
    assert caught.value.field == "scheduler"
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    with pytest.raises(InvalidRequest, match="accepts no noise levels") as caught:
        set_shifted(scheduler, DiffusionParams(num_inference_steps=4), 16, torch.device("cpu"))
    assert caught.value.field == "scheduler"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"scale_factors": [0.5]}, r"scale_factors is \[0.5\]; latents that grow between steps"),
        ({"use_karras_sigmas": True, "use_exponential_sigmas": True}, "cannot be created from its settings: Only one"),
    ],
)
def test_settings_that_are_refused_at_the_start(setting: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_index(tmp_path, "FluxPipeline", {"scheduler": ("diffusers", LCM)})
    (tmp_path / "scheduler").mkdir()
    write_json(tmp_path / "scheduler", "scheduler_config.json", {"_class_name": LCM, **setting})
    with pytest.raises(ConfigError, match=says) as caught:
        Schedulers(tmp_path)
    assert caught.value.field == "model"
