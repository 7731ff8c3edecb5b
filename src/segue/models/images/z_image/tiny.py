"""`segue tiny z-image`: write a small Z-Image checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from segue.models.family import TinyPreset
from segue.models.shared.diffusion.library import LIBRARIES, AutoConfig
from segue.models.shared.diffusion.tiny import (
    QWEN_SPECIAL,
    QWEN_TEMPLATE,
    RopeSize,
    randomise,
    scale_to,
    write_index,
    write_kl_vae,
    write_qwen_tokenizer,
)
from segue.models.shared.tiny.files import BASE_VOCAB
from segue.models.shared.tiny.sizes import check_size

PARTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen3Model"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "ZImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


SIZES: Mapping[str, RopeSize] = {"tiny": RopeSize(3, 2, (4, 6, 6)), "small": RopeSize(16, 6, (16, 24, 24))}
_HIDDEN = 64
"""Hidden size of the text encoder."""
_PREDICTION_STD = 1.0


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    write_index(directory, "ZImagePipeline", PARTS)
    write_qwen_tokenizer(directory / "tokenizer", QWEN_SPECIAL, chat_template=QWEN_TEMPLATE)
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        _make_text_encoder(directory, seed)
        _make_transformer(directory, SIZES[size], seed + 1)
        write_kl_vae(directory / "vae", seed + 2, scaling_factor=0.3611, shift_factor=0.1159)
    scheduler = LIBRARIES["diffusers"].FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.save_pretrained(directory / "scheduler")


def _make_text_encoder(directory: Path, seed: int) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=672,
        hidden_size=_HIDDEN,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=BASE_VOCAB,
        eos_token_id=BASE_VOCAB + 2,
        pad_token_id=BASE_VOCAB,
    )
    model = LIBRARIES["transformers"].Qwen3Model(config).eval()
    randomise(model, seed, {r"\.[qk]_norm\.": 2.0, r"\.o_proj\.": 4.0})
    model.save_pretrained(directory / "text_encoder")


def _make_transformer(directory: Path, small: RopeSize, seed: int) -> None:
    network = LIBRARIES["diffusers"].ZImageTransformer2DModel(
        in_channels=16,
        dim=small.heads * small.head,
        n_layers=small.layers,
        n_refiner_layers=1,
        n_heads=small.heads,
        n_kv_heads=small.heads,
        cap_feat_dim=_HIDDEN,
        axes_dims=list(small.rope),
        axes_lens=[1024, 128, 128],
    )
    network.eval()
    # make the prompt visible: sharp attention, whose output outweighs the residual
    randomise(network, seed, {r"\.norm_[qk]\.": 1.5, "^all_x_embedder": 0.5})
    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(16, 1, 8, 8, generator=generator) for _ in range(2)]
    texts = [torch.randn(12, _HIDDEN, generator=generator) for _ in range(2)]
    times = torch.tensor([0.1, 0.7])
    last = network.all_final_layer["2-1"].linear
    scale_to(_PREDICTION_STD, last, lambda: torch.cat(network(images, times, texts, return_dict=False)[0]))
    network.save_pretrained(directory / "transformer")


PRESETS = {"z-image": TinyPreset(tuple(SIZES), make)}
