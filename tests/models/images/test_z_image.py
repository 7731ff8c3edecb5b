"""Z-Image: the same images as diffusers' pipeline; rows of a call may differ in size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart
from image_parity import ImageParity, called_on_meta, full_size, on_meta, parameters, published

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest, TooLarge
from segue.models.images.z_image import tiny
from segue.models.images.z_image.denoiser import ZImageDenoiser
from segue.models.shared.tiny.files import write_json

GUIDED = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey, and without any colour",
    "guidance_scale": 3.0,
    "height": 64,
    "width": 96,
    "num_inference_steps": 5,
    "seed": 3,
}
PLAIN = {**GUIDED, "prompt": "a red bicycle", "guidance_scale": 0.0, "num_inference_steps": 3, "seed": 4}
TURNED = {"prompt": "a house", "height": 96, "width": 64, "num_inference_steps": 4, "seed": 5}
LARGER = {**PLAIN, "prompt": "a ship " * 40, "height": 112, "width": 96, "max_sequence_length": 30, "seed": 7}
NEAR = {**LARGER, "height": 64, "width": 176, "max_sequence_length": 64}
SEVERAL = {**GUIDED, "prompt": "seven brothers", "num_inference_steps": 4, "num_images_per_prompt": 2, "seed": 6}


class TestZImage(ImageParity):
    make = tiny.make
    pipeline = "ZImagePipeline"
    cases = (GUIDED, PLAIN, TURNED, LARGER, NEAR, SEVERAL)
    changes: ClassVar = {
        "prompt": "a small boot",
        "negative_prompt": "green",
        "guidance_scale": 2.9,
        "max_sequence_length": 10,
    }
    weights = (
        ("text_encoder", "network.layers.1.mlp.down_proj"),
        ("denoiser", "network.context_refiner.0.attention.to_v"),
        ("denoiser", "network.noise_refiner.0.attention.to_v"),
        *(("denoiser", f"network.layers.{block}.attention.to_v") for block in range(3)),
        ("decoder", "vae.decoder.mid_block.resnets.0.conv1"),
    )

    def test_rows_of_other_sizes_share_a_call(self, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
        made = chain.run(LARGER, NEAR)
        assert chain.batches == [2, 2, 2]
        assert max(apart(one, theirs[place]) for one, place in zip(made, (3, 4), strict=True)) < WITHIN

    @pytest.mark.parametrize(
        ("wrong", "field", "says"),
        [
            ({"height": 100}, "height", "96 or 112"),
            ({"width": 2064}, "width", "at most 2048"),
            ({"width": 99_999}, "width", "at most 4194304 .* 64 x 2048"),
            ({"max_sequence_length": 1000}, "max_sequence_length", "at most 992"),
            ({"true_cfg_scale": 3.0}, "true_cfg_scale", "takes no true_cfg_scale"),
        ],
    )
    def test_refused(self, chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**PLAIN, **wrong})
        assert field in str(caught.value.field)
        assert isinstance(caught.value, TooLarge) == ("2048" in says)


def test_the_longest_prompt_has_positions(tmp_path: Path) -> None:
    tiny.make(tmp_path)
    chain = Chain(tmp_path)
    [made] = chain.run({**PLAIN, "prompt": "a ship " * 900, "max_sequence_length": 992})
    assert made.pixels[0].isfinite().all()


def test_without_a_template(tmp_path: Path) -> None:
    tiny.make(tmp_path)
    write_json(tmp_path / "tokenizer", "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(ConfigError, match="chat template"):
        Chain(tmp_path)


def test_published_shapes(tmp_path: Path) -> None:
    configs = {
        "transformer": published("Z-Image-Turbo", "transformer"),
        "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0},
        "vae": {"block_out_channels": [128, 256, 512, 512]},
    }
    full_size(tmp_path, "ZImagePipeline", tiny.PARTS, configs)
    denoiser = ZImageDenoiser(on_meta(tmp_path, "denoiser"))
    assert parameters(denoiser.network) / 1e9 == pytest.approx(6.15, abs=0.01)
    conditions = [torch.zeros(length, 2560, dtype=torch.bfloat16, device="meta") for length in (70, 33)]
    sample, prediction = called_on_meta(denoiser, DiffusionParams(height=1024, width=768), conditions)
    assert prediction.shape == sample.latents.shape == (1, 16, 128, 96)
    assert prediction.dtype == torch.float32
