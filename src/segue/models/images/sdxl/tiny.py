"""`segue tiny sdxl`: write a small Stable Diffusion XL checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from segue.models.family import TinyPreset
from segue.models.shared.diffusion.library import LIBRARIES
from segue.models.shared.diffusion.tiny import make_clip, randomise, scale_to, write_clip_tokenizer, write_index
from segue.models.shared.tiny.sizes import check_size

PARTS = {
    "scheduler": ("diffusers", "EulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


@dataclass(frozen=True)
class _Small:
    """One size of the denoiser."""

    channels: tuple[int, int, int]
    layers: tuple[int, int]
    """Transformer layers of the two levels that have any."""


SIZES: Mapping[str, _Small] = {
    "tiny": _Small((16, 32, 32), (1, 2)),
    "small": _Small((64, 128, 256), (2, 6)),
}
"""`small` is for benchmarks: matmuls dominate its time, as in the published one."""
_HIDDEN = (32, 48)
"""Hidden sizes of the text encoders."""
_PROJECTION = 40
_SIZE_DIM = 8
"""Features of each of the six numbers of the size conditions."""
_PREDICTION_STD = 1.0
_PIXEL_STD = 0.5
"""Target standard deviation of pixels in [-1, 1]."""
_LATENT_STD = 15.0
"""Standard deviation of an untrained denoiser's result, times the VAE's scaling."""


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    write_index(directory, "StableDiffusionXLPipeline", PARTS, force_zeros_for_empty_prompt=True)
    vocab = write_clip_tokenizer(directory / "tokenizer")
    write_clip_tokenizer(directory / "tokenizer_2", pad="!")
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        one = {"hidden_size": _HIDDEN[0], "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        make_clip(directory / "text_encoder", "CLIPTextModel", vocab, seed, projection_dim=_HIDDEN[0], **one)
        two = {**one, "hidden_size": _HIDDEN[1], "hidden_act": "gelu", "projection_dim": _PROJECTION}
        make_clip(directory / "text_encoder_2", "CLIPTextModelWithProjection", vocab, seed + 1, **two)
        _make_unet(directory, SIZES[size], seed + 2)
        _make_vae(directory, seed + 3)
    LIBRARIES["diffusers"].EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="leading",
    ).save_pretrained(directory / "scheduler")


def _make_unet(directory: Path, small: _Small, seed: int) -> None:
    network = LIBRARIES["diffusers"].UNet2DConditionModel(
        sample_size=16,
        block_out_channels=small.channels,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, *small.layers),
        attention_head_dim=tuple(max(2, channels // 64) for channels in small.channels),
        norm_num_groups=8,
        cross_attention_dim=sum(_HIDDEN),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=_SIZE_DIM,
        projection_class_embeddings_input_dim=6 * _SIZE_DIM + _PROJECTION,
    )
    network.eval()
    # the prompt and the timestep need visible effect; slightly different noise must not yield another image
    gains = {r"attn1\.to_[qk]\.": 0.5, r"attn2\.to_(v|out)": 3.0, "time_emb_proj": 2.0}
    randomise(network, seed, {**gains, "conv_in": 0.3, "conv_shortcut": 0.7, r"ff\.net": 0.5})
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "sample": torch.randn(2, 4, 16, 16, generator=generator),
        "timestep": torch.tensor([300, 900]),
        "encoder_hidden_states": torch.randn(2, 77, sum(_HIDDEN), generator=generator),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, _PROJECTION, generator=generator),
            "time_ids": torch.tensor([[128.0, 128, 0, 0, 128, 128]] * 2),
        },
    }
    scale_to(_PREDICTION_STD, network.conv_out, lambda: network(**inputs, return_dict=False)[0])
    network.save_pretrained(directory / "unet")


def _make_vae(directory: Path, seed: int) -> None:
    vae = LIBRARIES["diffusers"].AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        sample_size=128,
        scaling_factor=0.13025,
    )
    vae.eval()
    randomise(vae, seed)
    generator = torch.Generator().manual_seed(seed)
    latents = _LATENT_STD / vae.config.scaling_factor * torch.randn(2, 4, 8, 8, generator=generator)
    # unclipped decoder outputs: measure including values that would be clipped
    scale_to(_PIXEL_STD, vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0])
    images = torch.rand(2, 3, 64, 64, generator=generator) * 2 - 1

    def means() -> torch.Tensor:
        return vae.encode(images, return_dict=False)[0].mean

    # scale an image's latents to the standard deviation that the network expects, 1 times the scaling; sampling adds
    # little
    vae.encoder.conv_out.bias.data[4:] = 0.0
    vae.quant_conv.weight.data[4:].mul_(0.1)
    scale_to(1 / vae.config.scaling_factor, vae.quant_conv, means)
    vae.save_pretrained(directory / "vae")


PRESETS = {"sdxl": TinyPreset(tuple(SIZES), make)}
