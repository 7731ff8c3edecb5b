"""Images as the model's two encoders take them: scaled, as patches of the vision tower, and as pixels of the VAE."""

from __future__ import annotations

import hashlib

import torch
from PIL import Image

from segue.engines.contract import Payload
from segue.models.omni.bagel.config import Config
from segue.models.omni.bagel.prompt import sizes
from segue.models.omni.bagel.vision import patches


def edited(image: Image.Image, config: Config) -> Image.Image:
    """An image at the size at which it is edited. As published, one that is only looked at is scaled to it, too."""
    return image.resize(sizes.scaled(*image.size, sizes.edited(config)), Image.Resampling.BICUBIC)


def seen(image: Image.Image, config: Config) -> Payload:
    """An image of `edited` as the vision tower sees it."""
    image = image.resize(sizes.scaled(*image.size, sizes.seen(config)), Image.Resampling.BICUBIC)
    size = config.vit.patch_size
    return {
        "kind": "image",
        "hash": _hash(image),
        "patches": patches(pixels(image), size),
        "grid": (image.height // size, image.width // size),
    }


def exact(image: Image.Image) -> Payload:
    """An image of `edited` as the VAE sees it."""
    return {"pixels": pixels(image), "latents_hash": _hash(image)}


def pixels(image: Image.Image) -> torch.Tensor:
    """[3, height, width] float32 in [-1, 1]."""
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(image.height, image.width, 3)
    return values.permute(2, 0, 1) / 127.5 - 1


def _hash(image: Image.Image) -> bytes:
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=32).digest()
