"""Text encoders and VAE of Stable Diffusion 3, Flux and Z-Image in their published shapes, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from picture_parity import full_size, on_meta, parameters

from segue.models.diffusion.loading import load_component

CLIP_L: dict[str, Any] = {
    "model_type": "clip_text_model",
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
}
CLIP_G = {
    **CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
T5_XXL = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


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
