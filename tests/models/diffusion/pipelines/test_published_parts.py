"""Text encoders and VAE of Stable Diffusion 3, Flux and Z-Image in their published shapes, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_parity import full_size, on_meta, parameters, published

from segue.models.shared.diffusion.loading import load_component

CLIP_L = published("stable-diffusion-3.5-large", "text_encoder")
CLIP_G = published("stable-diffusion-3-medium-diffusers", "text_encoder_2")
T5_XXL = published("stable-diffusion-3-medium-diffusers", "text_encoder_3")
QWEN3_4B = published("Z-Image-Turbo", "text_encoder")
VAE = published("stable-diffusion-3-medium-diffusers", "vae")


@pytest.mark.parametrize(
    ("part", "config", "millions"),
    [
        (("transformers", "CLIPTextModel"), CLIP_L, 123.06),
        (("transformers", "CLIPTextModelWithProjection"), CLIP_L, 123.65),
        (("transformers", "CLIPTextModelWithProjection"), CLIP_G, 694.66),
        (("transformers", "T5EncoderModel"), T5_XXL, 4762.31),
        (("transformers", "Qwen3Model"), QWEN3_4B, 4022.47),
        (("diffusers", "AutoencoderKL"), VAE, 83.82),
    ],
)
def test_published_parts(tmp_path: Path, part: tuple[str, str], config: dict[str, Any], millions: float) -> None:
    full_size(tmp_path, "AnyPipeline", {"part": part}, {"part": config})
    network = load_component(on_meta(tmp_path, "any"), "part")
    assert parameters(network) / 1e6 == pytest.approx(millions, abs=0.01)
