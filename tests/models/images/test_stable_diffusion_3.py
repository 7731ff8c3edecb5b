"""Stable Diffusion 3: the same images as diffusers' pipeline, with T5 and without, and what its parts refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from image_parity import ImageParity, called_on_meta, full_size, on_meta, parameters, published

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge
from segue.models.images.stable_diffusion_3 import tiny
from segue.models.images.stable_diffusion_3.denoiser import StableDiffusion3Denoiser
from segue.models.shared.diffusion.prompts import Condition

GUIDED = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey, and without any colour",
    "guidance_scale": 5.0,
    "height": 64,
    "width": 96,
    "num_inference_steps": 5,
    "max_sequence_length": 32,
    "seed": 3,
}
PLAIN = {**GUIDED, "prompt": "a red bicycle", "guidance_scale": 1.0, "num_inference_steps": 3, "seed": 4}
DEFAULTS = {"prompt": "a house", "num_inference_steps": 2, "seed": 5}
SEVERAL = {
    **GUIDED,
    "prompt": "seven brothers",
    "prompt_2": "seven sisters",
    "prompt_3": "and an only child",
    "negative_prompt_2": "a crowd",
    "negative_prompt_3": "nobody",
    "num_inference_steps": 4,
    "num_images_per_prompt": 2,
    "seed": 6,
}


class TestWithT5(ImageParity):
    make = tiny.make
    pipeline = "StableDiffusion3Pipeline"
    cases = (GUIDED, PLAIN, DEFAULTS, SEVERAL)
    changes: ClassVar = {
        "prompt": "a small boot",
        "prompt_2": "a small boot",
        "prompt_3": "a small boot",
        "negative_prompt": "green",
        "negative_prompt_2": "green",
        "negative_prompt_3": "green",
        "guidance_scale": 4.9,
        "max_sequence_length": 33,
    }
    weights = (
        ("clip_encoder", "networks.0.text_model.encoder.layers.1.mlp.fc2"),
        ("clip_encoder", "networks.1.text_projection"),
        ("t5_encoder", "network.encoder.block.1.layer.1.DenseReluDense.wo"),
        *(("denoiser", f"network.transformer_blocks.{block}.attn.to_v") for block in range(3)),
        ("denoiser", "network.transformer_blocks.1.attn2.to_v"),
        ("decoder", "vae.decoder.mid_block.resnets.0.conv1"),
    )

    @pytest.mark.parametrize(
        ("wrong", "field", "says"),
        [
            ({"height": 100}, "height", "96 or 112"),
            ({"width": 400}, "width", "at most 384"),
            ({"max_sequence_length": 513}, "max_sequence_length", "at most 512"),
            ({"true_cfg_scale": 3.0}, "true_cfg_scale", "takes no true_cfg_scale"),
            ({"scheduler": "DDIMScheduler"}, "scheduler", "FlowMatchEulerDiscreteScheduler"),
        ],
    )
    def test_refused(self, chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**PLAIN, **wrong})
        assert field in str(caught.value.field)
        assert isinstance(caught.value, TooLarge) == ("384" in says)


def test_without_t5(tmp_path: Path) -> None:
    """Zeros stand for what it would say."""
    tiny.PRESETS["sd3-without-t5"].make(tmp_path, "tiny", 0)
    chain = Chain(tmp_path)
    assert "t5_encoder" not in chain.graph.stages
    pipeline = pipeline_of(tmp_path, "StableDiffusion3Pipeline", text_encoder_3=None, tokenizer_3=None)
    cases = (GUIDED, {**SEVERAL, "prompt_3": "nobody reads it"})
    for case, made in zip(cases, chain.run(*cases), strict=True):
        assert apart(made, expected(pipeline, case)) < WITHIN
    [other] = chain.run({**GUIDED, "max_sequence_length": 64})
    assert apart(other, expected(pipeline, GUIDED)) > WITHIN, "zeros are attended to"


SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
MEDIUM = published("stable-diffusion-3-medium-diffusers", "transformer")
LARGE_3_5 = published("stable-diffusion-3.5-large", "transformer")
# in which it differs, as diffusers converts it
MEDIUM_3_5 = {**MEDIUM, "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm"}


@pytest.mark.parametrize(
    ("transformer", "billions"),
    [
        (MEDIUM, 2.03),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((MEDIUM_3_5, 2.24), (LARGE_3_5, 8.06))),
    ],
)
def test_published_shapes(tmp_path: Path, transformer: dict[str, Any], billions: float) -> None:
    configs = {
        "transformer": transformer,
        "scheduler": SCHEDULER,
        "vae": published("stable-diffusion-3-medium-diffusers", "vae"),
    }
    full_size(tmp_path, "StableDiffusion3Pipeline", tiny.PARTS, configs)
    denoiser = StableDiffusion3Denoiser(on_meta(tmp_path, "denoiser"))
    assert parameters(denoiser.network) / 1e9 == pytest.approx(billions, abs=0.01)
    text = torch.zeros(77 + 256, 4096, dtype=torch.bfloat16, device="meta")
    conditions = [Condition(text, text.new_zeros(2048))] * 2
    sample, prediction = called_on_meta(
        denoiser, DiffusionParams(height=1024, width=768, num_inference_steps=2), conditions
    )
    assert prediction.shape == sample.latents.shape == (1, 16, 128, 96)
    assert sample.tokens == 64 * 48
