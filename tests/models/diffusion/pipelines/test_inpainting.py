"""Images of which a mask keeps a part, and images to begin with: as diffusers' pipelines make them of the same
checkpoint, alone, in a batch with requests that have none, and joined late."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3InpaintPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_inpaint
from diffusion_chain import WITHIN, Chain, Made, apart, expected, pipeline_of, quiet
from PIL import Image

from segue.engines.module.contract import Work
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart, Message, Request
from segue.models.images.flux import tiny as flux
from segue.models.images.qwen_image import edit_input
from segue.models.images.qwen_image import tiny as qwen_image
from segue.models.images.sdxl import tiny as sdxl
from segue.models.images.stable_diffusion_3 import tiny as stable_diffusion_3
from segue.models.images.wan import tiny as wan
from segue.models.images.z_image import tiny as z_image
from selection import daily

pytestmark = [  # diffusers' schedulers and numpy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

EDIT = "QwenImageEditInpaintPipeline"
SHRINK = 64
"""What is edited has so many times fewer pixels than published, in both programs, so that this takes seconds."""


def make_image(seed: int, height: int, width: int) -> Image.Image:
    """Smooth, in colour."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def left_half(height: int, width: int) -> Image.Image:
    """White on the left."""
    mask = np.zeros((height, width), dtype=np.uint8)
    mask[:, : width // 2] = 255
    return Image.fromarray(mask)


SIZE = {"height": 64, "width": 96}
FIRST = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey, and without any colour",
    "image": make_image(0, 64, 96),
    "mask_image": left_half(64, 96),
    "strength": 0.7,
    "num_inference_steps": 5,
    "seed": 3,
}
WHOLE = {**FIRST, "prompt": "a house", "strength": 1.0, "num_inference_steps": 3, "seed": 4}
SEVERAL = {
    **FIRST,
    "prompt": "seven brothers",
    "image": make_image(1, 64, 96),
    "mask_image": left_half(50, 70),
    "num_images_per_prompt": 2,
    "num_inference_steps": 4,
    "seed": 6,
}


@dataclass(frozen=True)
class Kind:
    """A family as it is tested."""

    make: Any
    """Its tiny checkpoint."""
    inpaint: str
    img2img: str | None
    more: Mapping[str, Any]
    """Arguments of every case."""
    plain: Mapping[str, Any]
    """A request without an image (of a model that edits: without a mask), for the batch."""
    made: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the input stage."""
    theirs_only: Mapping[str, Any] = field(default_factory=dict)
    """What the library's pipeline is told besides."""


SHORT = {"max_sequence_length": 32}
PLAIN = {"prompt": "a red bicycle", "num_inference_steps": 4, "seed": 5}
KINDS = {
    "qwen-image": Kind(
        qwen_image.make,
        "QwenImageInpaintPipeline",
        "QwenImageImg2ImgPipeline",
        {**SIZE, "true_cfg_scale": 3.0},
        {**PLAIN, **SIZE},
    ),
    "qwen-image-edit": Kind(
        qwen_image.make,
        EDIT,
        None,
        {"true_cfg_scale": 3.0},
        {**PLAIN, "image": make_image(5, 64, 96)},
        {"pipeline": "QwenImageEditPipeline"},
    ),
    "flux": Kind(
        flux.make,
        "FluxInpaintPipeline",
        None,  # in the family's own tests
        {**SIZE, **SHORT, "true_cfg_scale": 3.0},
        {**PLAIN, **SIZE, **SHORT},
    ),
    "flux-kontext": Kind(
        flux.PRESETS["flux-kontext"].make,
        "FluxKontextInpaintPipeline",
        None,
        {**SHORT, "true_cfg_scale": 3.0},
        {**PLAIN, **SIZE, **SHORT, "max_area": 64 * 96},
        options={"auto_resize": False},  # images are seen as they are, so that this takes seconds
        theirs_only={"_auto_resize": False},
    ),
    "sd3": Kind(
        stable_diffusion_3.make,
        "StableDiffusion3InpaintPipeline",
        "StableDiffusion3Img2ImgPipeline",
        {**SIZE, **SHORT, "guidance_scale": 5.0},
        {**PLAIN, **SIZE, **SHORT},
    ),
    "sdxl": Kind(
        sdxl.make,
        "StableDiffusionXLInpaintPipeline",
        None,  # in the family's own tests
        {**SIZE, "guidance_scale": 6.0},
        {**PLAIN, **SIZE},
    ),
    "z-image": Kind(
        z_image.make,
        "ZImageInpaintPipeline",
        "ZImageImg2ImgPipeline",
        {**SHORT, "guidance_scale": 3.0},
        {**PLAIN, **SIZE, **SHORT},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _smaller() -> Iterator[None]:
    whole = pipeline_qwenimage_edit_inpaint.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline_qwenimage_edit_inpaint, "calculate_dimensions", lambda area, ratio: whole(area // SHRINK, ratio)
        )
        patch.setattr(edit_input, "AREA", edit_input.AREA // SHRINK)
        yield


@pytest.fixture(scope="module", params=daily(KINDS, KINDS.keys() - {"sd3", "flux"}))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def directory(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inpaint")
    kind.make(made, **kind.made)
    return made


@pytest.fixture(scope="module")
def chain(kind: Kind, directory: Path) -> Chain:
    return Chain(directory, options={"input": kind.options})


@pytest.fixture(scope="module")
def cases(kind: Kind) -> list[dict[str, Any]]:
    return [{**case, **kind.more} for case in (FIRST, WHOLE, SEVERAL)]


def inpainted(pipeline: Any, case: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the library makes of it. The pipeline of Stable Diffusion 3 forgets to undo, before it decodes, the shift
    of the latents, which its other pipelines undo: it is done for it."""
    if not isinstance(pipeline, StableDiffusion3InpaintPipeline):
        return expected(pipeline, case)
    given = {key: value for key, value in case.items() if key != "seed"}
    with quiet(), torch.inference_mode():
        made = pipeline(**given, generator=torch.Generator().manual_seed(case["seed"]), output_type="latent").images
        config = pipeline.vae.config
        pixels = pipeline.vae.decode(made / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    return list((pixels / 2 + 0.5).clamp(0, 1).movedim(1, -1))


@pytest.fixture(scope="module")
def theirs(kind: Kind, directory: Path, cases: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    pipeline = pipeline_of(directory, kind.inpaint)
    return [inpainted(pipeline, {**case, **kind.theirs_only}) for case in cases]


def test_a_part_is_made_anew(chain: Chain, cases: list[dict[str, Any]], theirs: list[list[torch.Tensor]]) -> None:
    for case, images in zip(cases, theirs, strict=True):
        [made] = chain.run(case)
        assert apart(made, images) < WITHIN


@pytest.mark.parametrize("late", [pytest.param({}, marks=pytest.mark.nightly), {1: 1, 3: 2}])
def test_in_a_batch(
    kind: Kind, chain: Chain, cases: list[dict[str, Any]], theirs: list[list[torch.Tensor]], late: dict[int, int]
) -> None:
    [alone] = chain.run(kind.plain)
    made = chain.run(*cases, kind.plain, late=late)
    assert max(chain.batches) > 2, "some share a call"
    assert max(apart(one, images) for one, images in zip(made, theirs, strict=False)) < WITHIN
    assert apart(made[-1], alone.pixels) < WITHIN, "a mask is its own request's alone"


def test_parity_fails_when_the_request_is_another(
    chain: Chain, cases: list[dict[str, Any]], theirs: list[list[torch.Tensor]]
) -> None:
    for changed in (
        {"image": make_image(7, 64, 96)},
        {"mask_image": left_half(64, 96).rotate(180)},
        {"strength": 0.9},
        {"seed": 8},
        {"prompt": "a small boot"},
    ):
        [other] = chain.run({**cases[0], **changed})
        assert apart(other, theirs[0]) > 5 * WITHIN, changed


def test_what_the_mask_keeps_is_the_image(chain: Chain, cases: list[dict[str, Any]]) -> None:
    """Two prompts make the same of it, and something else of the rest."""
    one, other = chain.run(cases[0], {**cases[0], "prompt": "a house by the sea"})
    [kept, anew] = _halves(one), _halves(other)
    assert float((kept[1] - anew[1]).abs().max()) < 1e-5
    assert float((kept[0] - anew[0]).abs().max()) > 0.01


def _halves(made: Made) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the latents: left, right."""
    latents = made.latents[0]
    middle = latents.shape[-1] // 2
    return latents[..., :middle], latents[..., middle:]


def test_from_an_image(kind: Kind, directory: Path, chain: Chain, cases: list[dict[str, Any]]) -> None:
    if kind.img2img is None:
        return
    pipeline = pipeline_of(directory, kind.img2img)
    given = [{key: value for key, value in case.items() if key != "mask_image"} for case in cases]
    for case, made in zip(given, chain.run(*given, kind.plain)[:-1], strict=True):
        assert apart(made, expected(pipeline, case)) < WITHIN


def test_both_ways_to_write_a_mask_say_the_same(kind: Kind, chain: Chain) -> None:
    """White, or transparent where it is made anew; and what the request brings is counted in latent tokens."""
    clear = make_image(3, 64, 96)
    clear.putalpha(left_half(64, 96).point(lambda level: 255 - level))
    payloads, texts = [], []
    for role, mask, words in (("mask_image", left_half(64, 96), "a house"), ("mask", clear, "a house by the sea")):
        files = [("", make_image(0, 64, 96)), (role, mask)]
        parts = [MediaPart("image", png(image), field=name or "image", role=name) for name, image in files]
        size = DiffusionParams(height=64, width=96)
        request = Request(request_id="r", prompt=words, messages=[Message("user", list(parts))], diffusion=size)
        [result] = chain.adapters["input"].run([Work("r", request)])
        assert result.error is None
        payloads.append(result.payload)
        per_token = chain.adapters["input"].rules.multiple ** 2
        assert result.modality_tokens["image"] == 64 * 96 // per_token
        texts.append(result.modality_tokens["text"])
        assert result.prompt_tokens == sum(result.modality_tokens.values())
    assert 1 < texts[0] < texts[1], "padding is not counted"
    assert torch.equal(payloads[0]["mask"], payloads[1]["mask"])
    assert 0.4 < float(payloads[0]["mask"].mean()) < 0.6


@pytest.mark.parametrize(
    ("wrong", "field", "says"),
    [
        ({"image": None}, "mask_image", "the request has no image"),
        ({"image": None, "mask_image": None}, "strength", "the request has none"),
        ({"strength": 0.0}, "strength", "above 0"),
    ],
)
def test_refused(
    kind: Kind, chain: Chain, cases: list[dict[str, Any]], wrong: dict[str, Any], field: str, says: str
) -> None:
    if kind.inpaint == EDIT and "image" in wrong:  # it works on nothing without one
        field, says = "image", "needs 1"
    with pytest.raises(InvalidRequest, match=says) as caught:
        chain.run({**cases[0], **wrong})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (qwen_image.make, {"pipeline": "QwenImageEditPlusPipeline"}),
        (wan.make, {"size": "2.1-i2v"}),
    ],
)
def test_models_without_are_refused_by_name(tmp_path: Path, make: Any, arguments: dict[str, Any]) -> None:
    make(tmp_path, **arguments)
    with pytest.raises(InvalidRequest, match="takes no mask_image") as caught:
        Chain(tmp_path).run({**PLAIN, "image": make_image(0, 64, 96), "mask_image": left_half(64, 96)})
    assert caught.value.field == "mask_image"
