"""Flux 2: the same images as diffusers' pipelines, from text and from images; Klein, with and without guidance."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from image_parity import ImageParity, called_on_meta, full_size, on_meta, parameters, published
from PIL import Image

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.flux2 import tiny
from segue.models.images.flux2.denoiser import Flux2Denoiser, shift
from segue.models.images.flux2.prompts import SYSTEM
from segue.models.images.flux2.vae import Flux2Decoder
from segue.models.shared.diffusion.input import InputImage


def make_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth, in colour."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


PLAIN: dict[str, Any] = {
    "prompt": "a red bicycle",
    "height": 64,
    "width": 96,
    "num_inference_steps": 3,
    "max_sequence_length": 96,
    "seed": 4,
}
EDITED = {
    **PLAIN,
    "prompt": "a small boat left the harbour in the early morning",
    "guidance_scale": 2.5,
    "num_inference_steps": 4,
    "image": [make_image(80, 100), make_image(64, 70, 1)],
    "seed": 3,
}
TURNED = {**PLAIN, "prompt": "a house", "height": 96, "width": 64, "guidance_scale": 9.0, "seed": 5}
SEVERAL = {**PLAIN, "prompt": "seven [IMG]brothers", "num_images_per_prompt": 2, "guidance_scale": 1.5}
SEVERAL |= {"num_inference_steps": 6, "seed": 6}
SIZED = {"prompt": "a mouse", "num_inference_steps": 2, "max_sequence_length": 96, "image": make_image(70, 120, 2)}
CHANGES = {
    "prompt": "a small boot",
    "guidance_scale": 3.5,
    "max_sequence_length": 97,
    "image": [make_image(80, 100), make_image(64, 70, 2)],
}
WEIGHTS = (
    *(("text_encoder", f"_network.layers.{layer}.mlp.up_proj") for layer in (3, 26)),
    *(("denoiser", f"network.transformer_blocks.{block}.attn.to_v") for block in range(2)),
    *(("denoiser", f"network.single_transformer_blocks.{block}.attn.to_out") for block in range(2)),
    ("vae_encoder", "vae.encoder.mid_block.resnets.0.conv1"),
    ("decoder", "vae.decoder.mid_block.resnets.0.conv1"),
)


class TestFlux2(ImageParity):
    make = tiny.make
    pipeline = "Flux2Pipeline"
    cases = (EDITED, SEVERAL, PLAIN, TURNED, SIZED)
    changes: ClassVar = CHANGES
    weights = WEIGHTS

    @pytest.mark.parametrize(
        ("wrong", "field", "says"),
        [
            ({"height": 100}, "height", "96 or 112"),
            ({"max_sequence_length": 513}, "max_sequence_length", "at most 512"),
            ({"negative_prompt": "a"}, "negative_prompt", "takes no negative_prompt"),
            ({"image": make_image(63, 90)}, "image", "at least 64 pixels"),
            ({"image": make_image(64, 513)}, "image", "at most 8 times"),
            ({"image": [make_image(64, 64)] * 11}, "image", "at most 10"),
            ({"mask_image": make_image(64, 64)}, "mask_image", "takes no mask_image"),
            ({"step_cache": "first_block"}, "step_cache", "it has taylorseer"),
        ],
    )
    def test_refused(self, chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**PLAIN, **wrong})
        assert field in str(caught.value.field)

    def test_large_images_are_seen_smaller(self, chain: Chain, directory: Path) -> None:
        """As the pipeline does it, number by number."""
        pipeline = pipeline_of(directory, self.pipeline)
        image = make_image(1300, 1111)
        [seen] = chain.adapters["input"].more(DiffusionParams(), [InputImage(image, "")])["images"]
        smaller = pipeline.image_processor._resize_to_target_area(image, 1024 * 1024)
        height, width = smaller.height // 16 * 16, smaller.width // 16 * 16
        [wanted] = pipeline.image_processor.preprocess(smaller, height=height, width=width, resize_mode="crop")
        assert seen.shape == wanted.shape == (3, 1104, 944)
        assert torch.equal(seen, wanted)


class TestKlein(ImageParity):
    make = tiny.PRESETS["flux2-klein"].make
    pipeline = "Flux2KleinPipeline"
    cases = (EDITED, SEVERAL, PLAIN, TURNED)
    changes: ClassVar = CHANGES
    weights = WEIGHTS


def test_klein_without_guidance(tmp_path: Path) -> None:
    """What is distilled for few steps has one row, whatever it is asked for."""
    tiny.PRESETS["flux2-klein-distilled"].make(tmp_path, "tiny", 0)
    chain, pipeline = Chain(tmp_path), pipeline_of(tmp_path, "Flux2KleinPipeline")
    made = chain.run(PLAIN, {**PLAIN, "guidance_scale": 7.0})
    [theirs] = expected(pipeline, PLAIN)
    assert max(apart(one, [theirs]) for one in made) < WITHIN
    assert max(chain.batches) == 2


def test_a_text_encoder_that_is_too_shallow(tmp_path: Path) -> None:
    tiny.make(tmp_path)
    path = tmp_path / "text_encoder" / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 32', '"num_hidden_layers": 29'))
    with pytest.raises(ConfigError, match="has 29 layers; the denoiser reads"):
        Chain(tmp_path, load_format="dummy")


def test_what_is_taken_from_the_library() -> None:
    assert SYSTEM == SYSTEM_MESSAGE
    for tokens in (16, 256, 4096, 4300, 4301, 9000):
        for steps in (1, 4, 28, 50):
            assert shift(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)


@pytest.mark.parametrize(
    ("model", "pipeline", "billions"),
    [("FLUX.2-dev", "Flux2Pipeline", 32.2), ("FLUX.2-klein-4B", "Flux2KleinPipeline", 3.9)],
)
def test_published_shapes(tmp_path: Path, model: str, pipeline: str, billions: float) -> None:
    configs = {part: published(model, part) for part in ("transformer", "scheduler", "vae")}
    full_size(tmp_path, pipeline, tiny.PARTS, configs)
    denoiser = Flux2Denoiser(on_meta(tmp_path, "denoiser"))
    assert parameters(denoiser.network) / 1e9 == pytest.approx(billions, abs=0.1)
    text = torch.zeros(512, configs["transformer"]["joint_attention_dim"], dtype=torch.bfloat16, device="meta")
    params = DiffusionParams(height=1024, width=768, guidance_scale=4.0)
    sample, prediction = called_on_meta(denoiser, params, [text])
    assert prediction.shape == sample.latents.shape == (1, 64 * 48, 128)
    latents = denoiser.unpacked(sample, prediction)
    assert latents.shape == (1, 128, 64, 48)
    decoder = Flux2Decoder(on_meta(tmp_path, "decoder"))
    assert decoder.pixels(latents).shape == (1, 1024, 768, 3)
