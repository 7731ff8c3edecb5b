"""`segue tiny bagel`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from segue.models.family import TinyPreset
from segue.models.omni.bagel.config import VAE_WEIGHTS, WEIGHTS, read_config
from segue.models.omni.bagel.tiny import config
from segue.models.omni.bagel.tiny.weights import make_vae, make_weights
from segue.models.shared.tiny.files import speakable, write_json
from segue.models.shared.tiny.qwen import write_qwen_tokenizer
from segue.models.shared.tiny.sizes import check_size

SIZES = tuple(config.SIZES)


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a BAGEL checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_qwen_tokenizer(directory, config.SPECIAL_TOKENS, ())
    files, latent_side = config.SIZES[size]
    for name, values in files.items():
        write_json(directory, name, values)
    sizes = msgspec.structs.replace(read_config(directory), latent_side=latent_side)
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        weights, vae = make_weights(sizes, speakable(tokenizer), seed), make_vae(sizes, seed)
    for name, tensors in ((WEIGHTS, weights), (VAE_WEIGHTS, vae)):
        whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(whole, directory / name, metadata={"format": "pt"})


PRESETS = {"bagel": TinyPreset(SIZES, make)}
