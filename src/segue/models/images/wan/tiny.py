"""`segue tiny wan`: write small checkpoints of Wan in the published layout, one for each published kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segue.models.family import TinyPreset
from segue.models.shared.diffusion.library import LIBRARIES, AutoConfig
from segue.models.shared.diffusion.tiny import T5_VOCAB, randomise, scale_to, write_index, write_t5_tokenizer
from segue.models.shared.tiny.sizes import check_size

PARTS = {
    "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "T5Tokenizer"),
    "transformer": ("diffusers", "WanTransformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}
_CLIP = {
    "image_encoder": ("transformers", "CLIPVisionModel"),
    "image_processor": ("transformers", "CLIPImageProcessor"),
}


@dataclass(frozen=True)
class _Small:
    """One kind of checkpoint."""

    images: int = 0
    """Number of input images: the first frame, or the first and the last."""
    looks: bool = False
    """Whether images are also embedded by CLIP (Wan 2.1)."""
    boundary: float | None = None
    """Timestep boundary between two experts (Wan 2.2 A14B)."""
    per_token: bool = False
    """Wan 2.2 TI2V: a timestep per token, and another VAE."""
    shift: float = 3.0
    layers: int = 3
    heads: int = 2
    head: int = 24


SIZES: Mapping[str, _Small] = {
    "tiny": _Small(),
    "2.1-i2v": _Small(images=1, looks=True),
    "2.1-flf2v": _Small(images=2, looks=True),
    "2.2-t2v": _Small(boundary=0.875, shift=12.0),
    "2.2-i2v": _Small(images=1, boundary=0.9, shift=5.0),
    "2.2-ti2v": _Small(per_token=True, shift=5.0),
    "small": _Small(layers=16, heads=6, head=64),
}
"""`tiny` and `small` are Wan 2.1, text to video; `small` is for benchmarks: matmuls dominate its time."""
_HIDDEN = 64
"""Hidden size of the text encoder."""
_SEEN = 32
"""Hidden size of CLIP."""
_SIDE, _PATCH = 28, 14
"""Pixels of CLIP's input and of its patches."""
_PREDICTION_STD = 1.0
_PIXEL_STD = 0.5
"""Target standard deviation of pixels in [-1, 1]."""


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    small = SIZES[size]
    directory.mkdir(parents=True, exist_ok=True)
    _write_index(directory, small)
    write_t5_tokenizer(directory / "tokenizer", longest=512)
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        _make_text_encoder(directory, seed)
        _make_transformer(directory / "transformer", small, seed + 1)
        if small.boundary is not None:
            _make_transformer(directory / "transformer_2", small, seed + 2)
        _make_vae(directory, small, seed + 3)
        if small.looks:
            _make_image_encoder(directory, seed + 4)
    LIBRARIES["diffusers"].UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=small.shift
    ).save_pretrained(directory / "scheduler")


def _write_index(directory: Path, small: _Small) -> None:
    parts: dict[str, Any] = dict(PARTS)
    parts["transformer_2"] = PARTS["transformer"] if small.boundary is not None else (None, None)
    settings: dict[str, Any] = {"boundary_ratio": small.boundary, "expand_timesteps": small.per_token}
    if small.images:
        parts.update(_CLIP if small.looks else dict.fromkeys(_CLIP, (None, None)))
        write_index(directory, "WanImageToVideoPipeline", parts, **settings)
    else:
        write_index(directory, "WanPipeline", parts, **settings)


def _make_text_encoder(directory: Path, seed: int) -> None:
    config = AutoConfig.for_model(
        "umt5",
        vocab_size=T5_VOCAB,
        d_model=_HIDDEN,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    model = LIBRARIES["transformers"].UMT5EncoderModel(config).eval()
    randomise(model, seed, {r"\.o\.": 2.0})
    model.save_pretrained(directory / "text_encoder")


def _make_image_encoder(directory: Path, seed: int) -> None:
    transformers = LIBRARIES["transformers"]
    config = AutoConfig.for_model(
        "clip_vision_model",
        hidden_size=_SEEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=_SIDE,
        patch_size=_PATCH,
        projection_dim=_SEEN,
    )
    model = transformers.CLIPVisionModel(config).eval()
    randomise(model, seed)
    model.save_pretrained(directory / "image_encoder")
    size = {"height": _SIDE, "width": _SIDE}
    transformers.CLIPImageProcessor(size={"shortest_edge": _SIDE}, crop_size=size).save_pretrained(
        directory / "image_processor"
    )


def _make_transformer(directory: Path, small: _Small, seed: int) -> None:
    channels = 48 if small.per_token else 16
    added = channels + 4 if small.images else 0
    seen = (_SIDE // _PATCH) ** 2 + 1
    network = LIBRARIES["diffusers"].WanTransformer3DModel(
        num_attention_heads=small.heads,
        attention_head_dim=small.head,
        in_channels=channels + added,
        out_channels=channels,
        text_dim=_HIDDEN,
        freq_dim=32,
        ffn_dim=small.heads * small.head * 2,
        num_layers=small.layers,
        image_dim=_SEEN if small.looks else None,
        added_kv_proj_dim=small.heads * small.head if small.looks else None,
        pos_embed_seq_len=small.images * seen if small.images > 1 else None,
    )
    network.eval()
    # make the prompt visible: sharp attention, whose output outweighs the residual
    gains = {r"\.norm_(added_)?[qk]\.": 1.5, r"\.(to_v|add_v_proj)\.": 2.0, r"\.to_out\.": 3.0, "patch_embedding": 0.5}
    randomise(network, seed, gains)
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(2, channels + added, 2, 4, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, 512, _HIDDEN, generator=generator),
        "timestep": torch.tensor([300.0, 900.0]),
    }
    if small.looks:
        looks = torch.randn(2 * small.images, seen, _SEEN, generator=generator)
        inputs["encoder_hidden_states_image"] = looks
    scale_to(_PREDICTION_STD, network.proj_out, lambda: network(**inputs, return_dict=False)[0])
    network.save_pretrained(directory)


def _make_vae(directory: Path, small: _Small, seed: int) -> None:
    shape: dict[str, Any] = {"base_dim": 8, "num_res_blocks": 1}
    if small.per_token:
        shape |= {"z_dim": 48, "decoder_base_dim": 12, "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}
        shape |= {"in_channels": 12, "out_channels": 12}
        shape |= {"latents_mean": [0.05 * (place % 7 - 3) for place in range(48)]}
        shape |= {"latents_std": [0.6 + 0.05 * (place % 5) for place in range(48)]}
    vae = LIBRARIES["diffusers"].AutoencoderKLWan(**shape)
    vae.eval()
    randomise(vae, seed)
    latents = torch.randn(1, vae.config.z_dim, 2, 8, 8, generator=torch.Generator().manual_seed(seed))
    latents = latents * torch.tensor(vae.config.latents_std).reshape(1, -1, 1, 1, 1)
    # outputs are clipped to [-1, 1]: start from a scale without clipping
    vae.decoder.conv_out.weight.data.mul_(1e-3)
    scale_to(_PIXEL_STD, vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0])
    vae.save_pretrained(directory / "vae")


PRESETS = {"wan": TinyPreset(tuple(SIZES), make)}
