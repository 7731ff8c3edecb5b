"""`segue tiny flux`, `flux-schnell` and `flux-kontext`: write small checkpoints in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from segue.models.family import TinyPreset
from segue.models.shared.diffusion.library import LIBRARIES
from segue.models.shared.diffusion.tiny import (
    CLIP_WIDTH,
    JOINT_GAINS,
    T5_WIDTH,
    Part,
    RopeSize,
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
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


@dataclass(frozen=True)
class _Small(RopeSize):
    """One size of the denoiser."""

    single: int
    """Single-stream layers, after the `layers` double-stream ones."""


SIZES: Mapping[str, _Small] = {"tiny": _Small(2, 2, (4, 6, 6), 2), "small": _Small(6, 6, (16, 24, 24), 12)}
_PREDICTION_STD = 1.0


def make(
    directory: Path, size: str = "tiny", seed: int = 0, *, pipeline: str = "FluxPipeline", distilled: bool = True
) -> None:
    """Write a checkpoint with random weights; equal size and seed give equal files.

    `distilled`: guidance distillation, as in "dev"; "schnell" has none. Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    write_index(directory, pipeline, PARTS)
    write_t5_tokenizer(directory / "tokenizer_2")
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        write_clip(directory, "", seed, projected=False)
        write_t5(directory / "text_encoder_2", seed + 1)
        _make_transformer(directory, SIZES[size], seed + 2, distilled)
        write_kl_vae(
            directory / "vae",
            seed + 3,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    shifts: dict[str, Any] = {"use_dynamic_shifting": True, "shift": 3.0} if distilled else {"shift": 1.0}
    scheduler = LIBRARIES["diffusers"].FlowMatchEulerDiscreteScheduler(base_shift=0.5, max_shift=1.15, **shifts)
    scheduler.save_pretrained(directory / "scheduler")


def _make_transformer(directory: Path, small: _Small, seed: int, distilled: bool) -> None:
    network = LIBRARIES["diffusers"].FluxTransformer2DModel(
        in_channels=64,
        num_layers=small.layers,
        num_single_layers=small.single,
        attention_head_dim=small.head,
        num_attention_heads=small.heads,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=distilled,
        axes_dims_rope=small.rope,
    )
    network.eval()
    randomise(network, seed, {**JOINT_GAINS, "^x_embedder": 0.5})
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "hidden_states": torch.randn(2, 16, 64, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, T5_WIDTH, generator=generator),
        "pooled_projections": torch.randn(2, CLIP_WIDTH, generator=generator),
        "timestep": torch.tensor([0.3, 0.9]),
        "guidance": torch.tensor([3.5, 3.5]) if distilled else None,
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(12, 3),
    }
    scale_to(_PREDICTION_STD, network.proj_out, lambda: network(**inputs, return_dict=False)[0])
    network.save_pretrained(directory / "transformer")


PRESETS = {
    "flux": TinyPreset(tuple(SIZES), make),
    "flux-schnell": TinyPreset(tuple(SIZES), partial(make, distilled=False)),
    "flux-kontext": TinyPreset(tuple(SIZES), partial(make, pipeline="FluxKontextPipeline")),
}
