"""What leaves over the edges of a diffusion family.

**input** makes of one request::

    {"texts": [item, …],       # what the text encoder encodes: the prompt's first, then the negative prompt's
     "settings": {…},          # `DiffusionParams` with the family's defaults filled in, as plain values
     "counts": {"text": int, "image": int},  # of the prompt and the pictures, for usage
     "mask": tensor,           # where a part of a picture is made anew: see `segue.models.diffusion.masks`
     …}                        # what else the family's stages need, e.g. "pictures"

**input → text_encoder** (`texts`) · **input → denoiser** (`settings`, and `mask`) · **text_encoder → denoiser**
(`whole`): `{"texts": [{name: tensor}, …]}`, one per item, in order; so for pictures, under `pictures`, where they are
encoded · **denoiser → decoder** (`whole`): per picture or clip `{"latents": tensor, "index": int, "latent_tokens": int,
"partial": int | None, …}`.
With several text encoders (`texts_for`) each gets its own part of the items.
"""

from __future__ import annotations

from collections.abc import Mapping

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.transfers import whole


def picked(*keys: str) -> Transfer:
    """A transfer of these keys of a payload; those that are missing are left out, and nothing is sent for none."""

    def transfer(request: StageRequest, output: StageOutput) -> Payload | None:
        payload = output.payload or {}
        return {key: payload[key] for key in keys if key in payload} or None

    return transfer


def renamed(key: str, name: str) -> Transfer:
    """A transfer of one key of a payload, under another name; nothing is sent where it is missing."""

    def transfer(request: StageRequest, output: StageOutput) -> Payload | None:
        payload = output.payload or {}
        return {name: payload[key]} if key in payload else None

    return transfer


def texts_for(name: str) -> Transfer:
    """A transfer to one of several text encoders: of each item what is under its name."""

    def transfer(request: StageRequest, output: StageOutput) -> Payload | None:
        payload = output.payload or {}
        return {"texts": [item[name] for item in payload["texts"]]} if "texts" in payload else None

    return transfer


texts = picked("texts")
settings = picked("settings", "mask")
pictures = picked("pictures")


def transfers(encoders: Mapping[str, Transfer]) -> dict[tuple[str, str], Transfer]:
    """Of all edges of a family; `encoders`: what each stage before the denoiser gets of the input."""
    return {
        **{("input", name): transfer for name, transfer in encoders.items()},
        ("input", "denoiser"): settings,
        **{(name, "denoiser"): whole for name in encoders},
        ("denoiser", "decoder"): whole,
    }
