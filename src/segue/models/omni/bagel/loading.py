"""Load each part of a BAGEL checkpoint.

Names in `ema.safetensors`: `language_model.*`, `vit_model.vision_model.*` with `connector.*` and `vit_pos_embed.*`, and
`vae2llm.*`, `llm2vae.*`, `time_embedder.*`, `latent_pos_embed.*`. `ae.safetensors` is a VAE in the form of the original
latent diffusion code, which diffusers' `AutoencoderKL` has under other names.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

import torch

from segue.engines.contract import LoadContext
from segue.models.omni.bagel.config import VAE_WEIGHTS, WEIGHTS, Config, VaeConfig
from segue.models.omni.bagel.decoder import BOTH, LanguageModel, language_model
from segue.models.omni.bagel.drawing.latents import LatentSpace
from segue.models.omni.bagel.library import AutoencoderKL
from segue.models.omni.bagel.vision import VisionEncoder
from segue.models.shared.checkpoint.checkpoint import Checkpoint, M, load_module

_VAE_GROUPS = 32
_VAE_NAMES = (
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.(down|up)_blocks\.(\d+)\.resnets\.", r".\1.\2.block."),
    (r"\.(down|up)_blocks\.(\d+)\.(down|up)samplers\.0\.", r".\1.\2.\3sample."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
)


def language_name(name: str) -> str:
    """A parameter of `LanguageModel` → its published name."""
    return f"language_model.{name}"


def vision_name(name: str) -> str:
    """A parameter of `VisionEncoder` → its published name."""
    return re.sub(r"^(?=embeddings\.|encoder\.|post_layernorm\.)", "vit_model.vision_model.", name)


def latent_name(name: str) -> str:
    """A parameter of `LatentSpace` → its published name."""
    return name


def vae_name(name: str, config: VaeConfig) -> str:
    """A parameter of the VAE → its published name. Decoder blocks are counted from the last one."""
    for pattern, new in _VAE_NAMES:
        name = re.sub(pattern, new, name)
    last = len(config.ch_mult) - 1
    return re.sub(r"\.up\.(\d+)\.", lambda found: f".up.{last - int(found[1])}.", name)


def autoencoder(config: VaeConfig) -> AutoencoderKL:
    """The VAE without weights."""
    levels = len(config.ch_mult)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(config.ch * factor for factor in config.ch_mult),
        layers_per_block=config.num_res_blocks,
        latent_channels=config.z_channels,
        norm_num_groups=_VAE_GROUPS,
        scaling_factor=config.scale_factor,
        shift_factor=config.shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


class AutoencoderFile(Checkpoint):
    """`ae.safetensors`: attention's matrices are stored as convolutions over one pixel."""

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        tensor = super().read(name, rows)
        return tensor.flatten(1) if ".attn_" in name and tensor.ndim == 4 else tensor


def load_language_model(ctx: LoadContext, config: Config, experts: Sequence[str] = BOTH) -> LanguageModel:
    """Decoder and head. Raises `ConfigError` with the missing tensor, as all below."""
    return _load(ctx, lambda: language_model(config.llm, experts), language_name)


def load_vision(ctx: LoadContext, config: Config) -> VisionEncoder:
    """Vision tower and projection."""
    return _load(ctx, lambda: VisionEncoder(config), vision_name)


def load_latent_space(ctx: LoadContext, config: Config) -> LatentSpace:
    """The decoder's way in and out for latents."""
    return _load(ctx, lambda: LatentSpace(config), latent_name)


def load_vae(ctx: LoadContext, config: Config) -> AutoencoderKL:
    """The VAE, in float32, as published."""
    return load_module(
        ctx,
        lambda: autoencoder(config.vae),
        lambda name: (vae_name(name, config.vae),),
        checkpoint=None if ctx.load_format == "dummy" else AutoencoderFile(ctx.model_dir, VAE_WEIGHTS),
        dtype=torch.float32,
        seed=zlib.crc32(b"vae"),
    )


def _load(ctx: LoadContext, build: Callable[[], M], published: Callable[[str], str]) -> M:
    return load_module(
        ctx,
        build,
        lambda name: (published(name),),
        checkpoint=None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir, WEIGHTS),
        seed=zlib.crc32(published.__name__.encode()),
    )
