"""Stable Diffusion XL: the same images as diffusers' pipelines, from text and from an image, alone, in a batch,
joined late, with any scheduler; and what its parts refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of, quiet
from image_parity import one_weight_more
from PIL import Image

from segue.engines.diffusion.contract import Sample
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge
from segue.models.images.sdxl import tiny
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers

pytestmark = [  # diffusers' schedulers and numpy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

GUIDED = {
    "prompt": "a small boat left the harbour in the early morning",
    "prompt_2": "a boat",
    "negative_prompt": "grey, and without any colour",
    "negative_prompt_2": "fog",
    "guidance_scale": 6.0,
    "height": 64,
    "width": 96,
    "num_inference_steps": 5,
    "seed": 3,
}
BY_ZEROS = {"prompt": "a red bicycle", "height": 64, "width": 96, "num_inference_steps": 3, "seed": 4}
UNGUIDED = {**BY_ZEROS, "prompt": "a house", "guidance_scale": 1.0, "num_inference_steps": 4, "seed": 5}
TURNED = {"prompt": "a house", "height": 96, "width": 64, "num_inference_steps": 4, "seed": 5, "clip_skip": 1}
# beside several images diffusers mixes the sizes up: what is told of the prompt's goes to every second row
SIZED = {**BY_ZEROS, "negative_original_size": (512, 512), "negative_target_size": (64, 64), "seed": 9}
SEVERAL = {
    **GUIDED,
    "prompt": "seven brothers",
    "num_inference_steps": 4,
    "num_images_per_prompt": 2,
    "guidance_rescale": 0.7,
    "original_size": (32, 64),
    "crops_coords_top_left": (4, 2),
    "seed": 6,
}
FROM_IMAGE = {
    "prompt": "a house by the sea",
    "negative_prompt": "grey",
    "image": Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 100, 3), dtype=np.uint8)),
    "strength": 0.6,
    "num_inference_steps": 5,
    "num_images_per_prompt": 2,
    "seed": 7,
}
CASES = (GUIDED, BY_ZEROS, UNGUIDED, TURNED, SEVERAL, FROM_IMAGE, SIZED)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sdxl")
    tiny.make(made)
    return made


@pytest.fixture(scope="module")
def chain(directory: Path) -> Chain:
    return Chain(directory)


@pytest.fixture(scope="module")
def pipelines(directory: Path) -> dict[bool, Any]:
    """From text; from an image."""
    text = pipeline_of(directory, "StableDiffusionXLPipeline")
    with quiet():
        image = diffusers.StableDiffusionXLImg2ImgPipeline(**text.components)
    image.set_progress_bar_config(disable=True)
    return {False: text, True: image}


@pytest.fixture(scope="module")
def theirs(pipelines: dict[bool, Any]) -> list[list[torch.Tensor]]:
    """By case."""
    return [expected(pipelines["image" in case], case) for case in CASES]


def test_alone(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    for case, image in zip(CASES, theirs, strict=True):
        [made] = chain.run(case)
        assert apart(made, image) < WITHIN
        for index, pixels in enumerate(image):
            levels = abs(made.shown[index].astype(int) - (pixels.numpy() * 255).round().astype(int))
            assert levels.max() <= 1


@pytest.mark.parametrize("late", [pytest.param({}, marks=pytest.mark.nightly), {1: 1, 2: 2, 3: 3, 5: 1}])
def test_in_a_batch(chain: Chain, theirs: list[list[torch.Tensor]], late: dict[int, int]) -> None:
    made = chain.run(*CASES, late=late)
    assert max(apart(one, image) for one, image in zip(made, theirs, strict=True)) < WITHIN
    assert max(chain.batches) > 4, "some share a call"


@pytest.mark.nightly  # test_wan takes one that is not the model's own
def test_every_scheduler(directory: Path, chain: Chain, pipelines: dict[bool, Any]) -> None:
    """All in one batch: those that scale what the network sees, those that add noise, those that call it twice."""
    known = Schedulers(directory).known
    assert {"DDIMScheduler", "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler"} <= set(known)
    short = {"num_inference_steps": 4, "num_images_per_prompt": 2}
    ddim = {"scheduler": "DDIMScheduler", "eta": 0.5}
    cases: list[dict[str, Any]] = [{**GUIDED, **short, "scheduler": name} for name in known]
    cases += [{**GUIDED, **short, **ddim}, {**FROM_IMAGE, "scheduler": "EulerAncestralDiscreteScheduler"}]
    default = pipelines[False].scheduler
    for case, made in zip(cases, chain.run(*cases), strict=True):
        pipeline = pipelines["image" in case]
        with quiet():
            pipeline.scheduler = getattr(diffusers, case["scheduler"]).from_config(default.config)
            wanted = expected(pipeline, case)
        pipeline.scheduler = default
        assert apart(made, wanted) < WITHIN, case["scheduler"]


def test_images_show_what_was_asked_for(theirs: list[list[torch.Tensor]]) -> None:
    for image in theirs:
        assert all(0.1 < float(one.std()) < 0.4 for one in image), "not grey"
    first, second = theirs[4]
    assert float((first - second).abs().mean()) > 0.05


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        (0, {"prompt": "a small boot"}),
        (0, {"prompt_2": "a boot"}),
        (0, {"negative_prompt": "green"}),
        (0, {"negative_prompt_2": "green"}),
        (0, {"seed": 8}),
        (0, {"guidance_scale": 5.0}),
        (0, {"target_size": (32, 32)}),
        (0, {"clip_skip": 1}),
        (5, {"strength": 0.8}),
        (5, {"image": Image.new("RGB", (100, 70), "red")}),
    ],
)
def test_parity_fails_when_the_request_is_another(
    chain: Chain, theirs: list[list[torch.Tensor]], case: int, changed: dict[str, Any]
) -> None:
    [made] = chain.run({**CASES[case], **changed})
    assert apart(made, theirs[case]) > 5 * WITHIN


@pytest.mark.parametrize(
    ("case", "stage", "name"),
    [
        (0, "text_encoder", "_network.encoder.layers.1.mlp.fc2"),
        (0, "text_encoder_2", "_network.text_model.encoder.layers.0.mlp.fc2"),
        (0, "text_encoder_2", "_network.text_projection"),
        (0, "denoiser", "network.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_v"),
        (0, "denoiser", "network.add_embedding.linear_1"),
        (0, "decoder", "vae.decoder.mid_block.resnets.0.conv1"),
        (5, "vae_encoder", "_vae.encoder.mid_block.resnets.0.conv1"),
    ],
)
def test_parity_fails_when_one_weight_is_another(
    directory: Path, theirs: list[list[torch.Tensor]], case: int, stage: str, name: str
) -> None:
    chain = Chain(directory)
    root, _, path = name.partition(".")
    layer = getattr(chain.adapters[stage], root).get_submodule(path)
    with one_weight_more(layer), one_weight_more(layer):
        [made] = chain.run(CASES[case])
    assert apart(made, theirs[case]) > WITHIN


def test_progress_and_previews(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    [made] = chain.run({**SEVERAL, "partial_images": 2})
    assert apart(made, theirs[4]) < WITHIN
    assert sorted(made.progress) == [(index, step) for index in (0, 1) for step in (1, 2, 3, 4)]
    assert sorted(made.previews) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {image.shape for image in made.previews.values()} == {(32, 48, 3)}


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("scheduler", [None, "DDIMScheduler"])
def test_previews_show_what_a_prediction_points_at(chain: Chain, kind: str, scheduler: str | None) -> None:
    """Of noise that is known, the clean latents are known."""
    denoiser, rng = chain.adapters["denoiser"], torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(1, 4, 8, 8, generator=rng) for _ in range(2))
    made = denoiser.schedulers.make(scheduler)
    made.register_to_config(prediction_type=kind)
    made.set_timesteps(5)
    timestep = made.timesteps[2:3]
    latents = made.add_noise(clean, noise, timestep)
    alpha = denoiser._alphas[int(timestep)]
    answer = {
        "epsilon": noise,
        "sample": clean,
        "v_prediction": alpha.sqrt() * noise - (1 - alpha).sqrt() * clean,
    }[kind]
    sample = Sample("0", 0, latents, made, list(timestep), 64, None, [], DiffusionParams())
    assert torch.allclose(denoiser.clean(sample, answer), clean, atol=1e-3)


@pytest.mark.parametrize(
    ("wrong", "field", "says"),
    [
        ({"height": 100}, "height", "96 or 104"),
        ({"width": 4096, "height": 4096}, "height", "2048 x 2048"),
        ({"scheduler": "EulerDiscrete"}, "scheduler", "did you mean 'EulerDiscreteScheduler'"),
        ({"scheduler": "EDMEulerScheduler"}, "scheduler", "cannot sample this model; known: DDIM"),
        ({"scheduler": "PNDMScheduler"}, "num_inference_steps", "PNDMScheduler refuses"),
        ({"scheduler": "HeunDiscreteScheduler", "sigmas": [3.0, 1.0]}, "sigmas", "Heun"),
        ({"scheduler": "EulerDiscreteScheduler", "sigmas": [3.0]}, "sigmas", "makes no step of them"),
        ({"scheduler": "UniPCMultistepScheduler", "sigmas": [3.0, 1.0]}, "sigmas", "UniPCMultistepScheduler refuses"),
        ({"sigmas": [float(level) for level in range(201, 0, -1)]}, "sigmas", "at most 200"),
        ({"sigmas": []}, "sigmas", "starts above 0"),
        ({"sigmas": [0.0, 1.0]}, "sigmas", r"\[0.0, 1.0\]; it must be a list of noise levels that starts above 0"),
        ({"sigmas": [1.0, 3.0]}, "sigmas", "falls"),
        ({"sigmas": [1.0, 1.0]}, "sigmas", "falls"),
        ({"sigmas": [1.0, -1.0]}, "sigmas", "from 0 to 10000"),
        ({"sigmas": [float("inf"), 1.0]}, "sigmas", "from 0 to 10000"),
        ({"sigmas": [3.0, float("nan"), 1.0]}, "sigmas", "from 0 to 10000"),
        ({"sigmas": [1e300, 1.0]}, "sigmas", "from 0 to 10000"),
        ({"guidance_scale": 1e38}, "guidance_scale", "from 0 to 10000"),
        ({"true_cfg_scale": 3.0}, "true_cfg_scale", "takes no true_cfg_scale"),
        ({"strength": 0.5}, "strength", "has none"),
        ({"image": [Image.new("RGB", (64, 64))] * 2}, "image", "at most 1"),
        ({"mask_image": Image.new("RGB", (64, 64))}, "mask_image", "the request has no image"),
        ({"image": Image.new("RGB", (64, 64)), "strength": 0.1}, "strength", "leaves none"),
        ({"clip_skip": 3}, "clip_skip", "at most 2"),
        ({"guidance_rescale": 2.0}, "guidance_rescale", "from 0 to 1"),
        ({"original_size": (64, -1)}, "original_size", "two numbers"),
        ({"original_size": 64}, "original_size", "array"),
    ],
)
def test_refused(chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
    case = {**BY_ZEROS, "num_inference_steps": None if "sigmas" in wrong else 3}
    with pytest.raises(InvalidRequest, match=says) as caught:
        chain.run({**case, **wrong})
    assert field in str(caught.value.field)
    assert isinstance(caught.value, TooLarge) == (says in ("2048 x 2048", "at most 200"))


def test_the_same_seed_makes_the_same_files(directory: Path, tmp_path: Path) -> None:
    tiny.make(tmp_path / "again")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(directory)).read_bytes(), path
