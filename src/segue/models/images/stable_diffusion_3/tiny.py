"""`segue tiny sd3`: write a small Stable Diffusion 3.5 checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from segue.models.family import TinyPreset
from segue.models.shared.diffusion.library import LIBRARIES
from segue.models.shared.diffusion.tiny import (
    CLIP_WIDTH,
    JOINT_GAINS,
    T5_WIDTH,
    Part,
    randomise,
    scale_to,
    write_clip,
    write_index,
    write_kl_vae,
    write_t5,
    write_t5_tokenizer,
)
from segue.models.shared.tiny.sizes import check_size

PARTS: Mapping[str, Part] = {
    "feature_extractor": (None, None),
    "image_encoder": (None, None),
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "tokenizer_3": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "SD3Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


@dataclass(frozen=True)
class _Small:
    """One size of the denoiser."""

    layers: int
    heads: int
    head: int


SIZES: Mapping[str, _Small] = {"tiny": _Small(3, 2, 16), "small": _Small(16, 6, 64)}
_PREDICTION_STD = 1.0


def make(directory: Path, size: str = "tiny", seed: int = 0, *, with_t5: bool = True) -> None:
    """Write a checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    absent = {} if with_t5 else {"text_encoder_3": (None, None), "tokenizer_3": (None, None)}
    write_index(directory, "StableDiffusion3Pipeline", {**PARTS, **absent})
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        write_clip(directory, "", seed, projected=True)
        write_clip(directory, "_2", seed + 1, projected=True, pad="!")
        if with_t5:
            write_t5_tokenizer(directory / "tokenizer_3")
            write_t5(directory / "text_encoder_3", seed + 2)
        _make_transformer(directory, SIZES[size], seed + 3)
        write_kl_vae(
            directory / "vae",
            seed + 4,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    LIBRARIES["diffusers"].FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(directory / "scheduler")


def _make_transformer(directory: Path, small: _Small, seed: int) -> None:
    network = LIBRARIES["diffusers"].SD3Transformer2DModel(
        sample_size=16,
        num_layers=small.layers,
        attention_head_dim=small.head,
        num_attention_heads=small.heads,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=small.heads * small.head,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=24,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    network.eval()
    randomise(network, seed, JOINT_GAINS)
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "hidden_states": torch.randn(2, 16, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, T5_WIDTH, generator=generator),
        "pooled_projections": torch.randn(2, 2 * CLIP_WIDTH, generator=generator),
        "timestep": torch.tensor([300.0, 900.0]),
    }
    scale_to(_PREDICTION_STD, network.proj_out, lambda: network(**inputs, return_dict=False)[0])
    network.save_pretrained(directory / "transformer")


PRESETS = {
    "sd3": TinyPreset(tuple(SIZES), make),
    "sd3-without-t5": TinyPreset(tuple(SIZES), partial(make, with_t5=False)),
}
