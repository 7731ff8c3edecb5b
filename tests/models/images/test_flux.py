"""Flux: the same images as diffusers' pipelines, from text, from an image, and edited (Kontext)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from image_parity import ImageParity, called_on_meta, full_size, on_meta, parameters, published
from PIL import Image

from segue.engines.diffusion.memory import Room
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.flux import tiny
from segue.models.images.flux.denoiser import Edited, FluxDenoiser, KontextDenoiser
from segue.models.images.flux.sizes import adjusted, preferred
from segue.models.shared.diffusion.prompts import Condition

PLAIN = {
    "prompt": "a red bicycle",
    "height": 64,
    "width": 96,
    "num_inference_steps": 3,
    "max_sequence_length": 32,
    "seed": 4,
}
GUIDED = {
    **PLAIN,
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey, and without any colour",
    "true_cfg_scale": 3.0,
    "guidance_scale": 2.5,
    "num_inference_steps": 5,
    "seed": 3,
}
TURNED = {**PLAIN, "prompt": "a house", "height": 96, "width": 64, "guidance_scale": 9.0, "seed": 5}
SEVERAL = {
    **GUIDED,
    "prompt": "seven brothers",
    "prompt_2": "seven sisters",
    "negative_prompt_2": "nobody",
    "num_inference_steps": 4,
    "num_images_per_prompt": 2,
    "seed": 6,
}
WEIGHTS = (
    ("clip_encoder", "networks.0.encoder.layers.1.mlp.fc2"),
    ("t5_encoder", "network.encoder.block.1.layer.1.DenseReluDense.wo"),
    *(("denoiser", f"network.transformer_blocks.{block}.attn.to_v") for block in range(2)),
    *(("denoiser", f"network.single_transformer_blocks.{block}.proj_mlp") for block in range(2)),
    ("decoder", "vae.decoder.mid_block.resnets.0.conv1"),
)
CHANGES = {
    "prompt": "a small boot",
    "prompt_2": "a small boot",
    "negative_prompt": "green",
    "negative_prompt_2": "green",
    "true_cfg_scale": 2.9,
    "guidance_scale": 3.5,
    "max_sequence_length": 33,
}


def make_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth, in colour."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


class TestFlux(ImageParity):
    make = tiny.make
    pipeline = "FluxPipeline"
    cases = (GUIDED, PLAIN, TURNED, SEVERAL)
    changes: ClassVar = CHANGES
    weights = WEIGHTS

    @pytest.mark.parametrize(
        ("wrong", "field", "says"),
        [
            ({"height": 100}, "height", "96 or 112"),
            ({"max_sequence_length": 513}, "max_sequence_length", "at most 512"),
            ({"prompt_3": "a"}, "prompt_3", "takes no prompt_3"),
            ({"max_area": 4096}, "max_area", "takes no max_area"),
            ({"strength": 0.5}, "strength", "the request has none"),
            ({"image": [make_image(8, 8), make_image(8, 8)]}, "image", "at most 1"),
        ],
    )
    def test_refused(self, chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**PLAIN, **wrong})
        assert field in str(caught.value.field)

    def test_from_an_image(self, directory: Path, chain: Chain) -> None:
        """With those that have none in one batch; the noise of the image's latents is that of the pipeline, too."""
        pipeline = pipeline_of(directory, "FluxImg2ImgPipeline")
        cases: list[dict[str, Any]] = [
            {**GUIDED, "image": make_image(80, 120), "strength": 0.7},
            {**PLAIN, "image": make_image(64, 96, 1), "num_inference_steps": 4},
            {**SEVERAL, "image": make_image(33, 64, 2), "strength": 1.0},
        ]
        made = chain.run(PLAIN, *cases, late={2: 1})[1:]
        for case, one in zip(cases, made, strict=True):
            assert apart(one, expected(pipeline, case)) < WITHIN
        assert len(made[0].progress) == 4, "of 5 steps, 3.5 are due"
        for changed in ({"image": make_image(80, 120, 3)}, {"strength": 0.9}, {"seed": 8}):
            [other] = chain.run({**cases[0], **changed})
            assert float((other.pixels[0] - made[0].pixels[0]).abs().max()) > 5 * WITHIN


class TestKontext(ImageParity):
    """Small images: at their own size, and in an area that is told, so that it is not a megapixel each."""

    make = tiny.PRESETS["flux-kontext"].make
    pipeline = "FluxKontextPipeline"
    cases = (
        {**GUIDED, "image": make_image(80, 50), "max_area": 64 * 96},
        {**PLAIN, "image": make_image(80, 50, 1), "max_area": 64 * 96, "num_inference_steps": 4},
        {**PLAIN, "max_area": 64 * 64},
        {**SEVERAL, "image": make_image(64, 64), "max_area": 64 * 96},
    )
    changes: ClassVar = {**CHANGES, "image": make_image(80, 50, 3), "max_area": 64 * 64}
    weights = (*WEIGHTS, ("vae_encoder", "vae.encoder.mid_block.resnets.0.conv1"))
    options: ClassVar = {"auto_resize": False}
    theirs_only: ClassVar = {"_auto_resize": False}

    def test_images_are_seen_in_a_size_the_network_knows(self, directory: Path) -> None:
        chain = Chain(directory)
        seen = [
            chain.adapters["input"].more(DiffusionParams(), [_Shown(make_image(*size))])["images"][0]
            for size in ((50, 50), (300, 700), (1000, 600))
        ]
        assert [tuple(one.shape) for one in seen] == [(3, 1024, 1024), (3, 672, 1568), (3, 1328, 800)]

    def test_what_a_mask_opens_is_like_a_reference(self, directory: Path, chain: Chain) -> None:
        """Whatever order the images come in, and beside a request that has none."""
        pipeline = pipeline_of(directory, "FluxKontextInpaintPipeline")
        mask = Image.new("L", (90, 60))
        mask.paste(255, (0, 0, 50, 60))
        case = {
            **GUIDED,
            "image_reference": make_image(50, 40, 2),
            "image": make_image(70, 100),
            "mask_image": mask,
            "num_images_per_prompt": 2,
            "height": None,
            "width": None,
        }
        theirs = expected(pipeline, {**case, **self.theirs_only})
        made, _ = chain.run(case, {**case, "image_reference": None})
        assert made.pixels[0].shape == (64, 96, 3)
        assert apart(made, theirs) < WITHIN
        assert len(made.progress) == 10, "strength is 1 where nothing is said"
        for changed in ({"image_reference": None}, {"image_reference": make_image(50, 40, 3)}, {"strength": 0.5}):
            [other] = chain.run({**case, **changed})
            assert apart(other, theirs) > 5 * WITHIN, changed

    @pytest.mark.parametrize(
        ("wrong", "field", "says"),
        [
            ({"height": 32}, "height", "the size of the resized image, 96 x 64"),
            ({"width": 64, "height": 64}, "width", "leave the size out"),
            ({"max_area": 64 * 96}, "max_area", "leave it out"),
            ({"image": make_image(15, 96)}, "image", "at least 16 x 16"),
            ({"image_reference": make_image(96, 15)}, "image_reference", "at least 16 x 16"),
            ({"image": [make_image(64, 96), make_image(64, 96)]}, "image", "at most 1"),
            ({"mask_image": None}, "strength", "goes with a mask"),
            (
                {"mask_image": None, "strength": None, "image_reference": make_image(64, 96)},
                "image_reference",
                "no mask",
            ),
            ({"image": None, "image_reference": make_image(64, 96)}, "mask_image", "the request has no image"),
        ],
    )
    def test_refused(self, chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
        given = {
            "prompt": "a house",
            "image": make_image(64, 96),
            "mask_image": Image.new("L", (8, 8)),
            "strength": 0.9,
        }
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**given, **wrong})
        assert caught.value.field == field

    def test_an_option_that_is_none(self, directory: Path) -> None:
        with pytest.raises(ConfigError, match="true or false"):
            Chain(directory, options={"input": {"auto_resize": "no"}})


class _Shown:
    role = "image"

    def __init__(self, image: Image.Image) -> None:
        self.image = image


def test_sizes_of_kontext() -> None:
    assert adjusted(1024, 1024, None, 16) == (1024, 1024)
    assert adjusted(512, 512, None, 16) == (1024, 1024)
    assert adjusted(600, 1000, None, 16) == (784, 1312)
    assert adjusted(64, 96, 64 * 96, 16) == (64, 96)
    assert preferred(1024, 1000, 16) == (1024, 1024)


def test_schnell(tmp_path: Path) -> None:
    """It knows no guidance, and its noise levels are not shifted."""
    tiny.PRESETS["flux-schnell"].make(tmp_path, "tiny", 0)
    chain, pipeline = Chain(tmp_path), pipeline_of(tmp_path, "FluxPipeline")
    cases = ({**PLAIN, "guidance_scale": 0.0}, SEVERAL)
    for case, made in zip(cases, chain.run(*cases), strict=True):
        assert apart(made, expected(pipeline, case)) < WITHIN


@pytest.mark.parametrize("distilled", [False, True])
def test_published_shapes(tmp_path: Path, distilled: bool) -> None:
    model = "FLUX.1-dev" if distilled else "FLUX.1-schnell"
    configs = {
        "transformer": published(model, "transformer"),
        "scheduler": published("FLUX.1-dev", "scheduler"),
        "vae": published("stable-diffusion-3.5-large", "vae"),  # of the same shape
    }
    full_size(tmp_path, "FluxPipeline", tiny.PARTS, configs)
    kind = KontextDenoiser if distilled else FluxDenoiser
    denoiser = kind(on_meta(tmp_path, "denoiser"))
    assert parameters(denoiser.network) / 1e9 == pytest.approx(11.90 if distilled else 11.89, abs=0.01)
    text = torch.zeros(512, 4096, dtype=torch.bfloat16, device="meta")
    plain = Condition(text, text.new_zeros(768))
    condition = Edited(*plain, text.new_zeros(86 * 47, 64), (172, 94)) if distilled else plain
    params = DiffusionParams(height=1024, width=768, guidance_scale=3.5)
    sample, prediction = called_on_meta(denoiser, params, [condition])
    assert prediction.shape == sample.latents.shape == (1, 64 * 48, 64)
    assert denoiser.unpacked(sample, prediction).shape == (1, 16, 128, 96)


def test_a_text_takes_memory_at_any_size(tmp_path: Path) -> None:
    tiny.make(tmp_path)
    denoiser = Chain(tmp_path).adapters["denoiser"]
    *_, sample = denoiser.trials()
    assert (sample.params.height, sample.params.width, len(sample.conditions[0].text)) == (1024, 1024, 512)
    per_token = denoiser.row_bytes(sample) / (sample.tokens + 512)
    image = torch.zeros(256, 64)
    edited = replace(sample, conditions=[Edited(*sample.conditions[0], image, (32, 32))])
    kontext = KontextDenoiser.other_tokens(object.__new__(KontextDenoiser), edited)
    assert kontext == 512 + 256
    room = Room(denoiser, denoiser.weight_bytes + int(per_token * (sample.tokens / 2 + 512)))
    refusal = room.refusal(sample)
    assert refusal is not None
    offered = re.search(r"(\d+) x (\d+) would fit", refusal.message)
    assert offered is not None
    share = int(offered[1]) * int(offered[2]) / 1024**2
    assert 0.4 < share <= 0.5
    assert room.refusal(replace(sample, tokens=int(sample.tokens * share))) is None
