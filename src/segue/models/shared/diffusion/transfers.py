"""The transfers between the stages of a diffusion family.

The **input** stage makes of one request::

    {"texts": [item, …],       # items for the text encoder: the prompt's first, then the negative prompt's
     "settings": {…},          # `DiffusionParams` with the family's defaults filled in, as plain values
     "counts": {"text": int, "image": int},  # tokens of the prompt and the images, for usage
     "mask": tensor,           # where an image is repainted: see `segue.models.shared.diffusion.masks`
     …}                        # further entries of the family, e.g. "images"

**input → text_encoder** (`texts`) · **input → denoiser** (`settings`, and `mask`) · **text_encoder → denoiser**
(`whole`): `{"texts": [{name: tensor}, …]}`, one per item, in order; likewise encoded images under `images` ·
**denoiser → decoder** (`whole`): per image or clip `{"latents": tensor, "index": int, "latent_tokens": int,
"partial": int | None, …}`.
With several text encoders (`texts_for`) each gets its own part of the items.
"""

from __future__ import annotations

from collections.abc import Mapping

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.shared.transfers import whole


def picked(*keys: str) -> Transfer:
    """A transfer of these keys of a payload; missing keys are omitted, and nothing is sent if all are missing."""

    def transfer(request: StageRequest, output: StageOutput) -> Payload | None:
        payload = output.payload or {}
        return {key: payload[key] for key in keys if key in payload} or None

    return transfer


def renamed(key: str, name: str) -> Transfer:
    """A transfer of one key of a payload under another name; nothing is sent if it is missing."""

    def transfer(request: StageRequest, output: StageOutput) -> Payload | None:
        payload = output.payload or {}
        return {name: payload[key]} if key in payload else None

    return transfer


def texts_for(name: str) -> Transfer:
    """A transfer to one of several text encoders: each item's entry under its name."""

    def transfer(request: StageRequest, output: StageOutput) -> Payload | None:
        payload = output.payload or {}
        return {"texts": [item[name] for item in payload["texts"]]} if "texts" in payload else None

    return transfer


texts = picked("texts")
settings = picked("settings", "mask")
images = picked("images")


def transfers(encoders: Mapping[str, Transfer]) -> dict[tuple[str, str], Transfer]:
    """The transfers of all edges of a family; `encoders`: the input's transfer to each stage before the denoiser."""
    return {
        **{("input", name): transfer for name, transfer in encoders.items()},
        ("input", "denoiser"): settings,
        **{(name, "denoiser"): whole for name in encoders},
        ("denoiser", "decoder"): whole,
    }
