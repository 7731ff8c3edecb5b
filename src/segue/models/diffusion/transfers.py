"""What leaves over the edges of a diffusion family.

**input** makes of one request::

    {"texts": [item, …],       # what the text encoder encodes: the prompt's first, then the negative prompt's
     "settings": {…},          # `DiffusionParams` with the family's defaults filled in, as plain values
     …}                        # what else the family's stages need, e.g. "pictures"

**input → text_encoder** (`texts`) · **input → denoiser** (`settings`) · **text_encoder → denoiser** (`whole`):
`{"texts": [{name: tensor}, …]}`, one per item, in order; so for pictures, under `pictures`, where they are encoded ·
**denoiser → decoder** (`whole`): per picture or clip `{"latents": tensor, "index": int, "partial": int | None, …}`.
With several text encoders (`texts_for`) each gets its own part of the items.
"""

from __future__ import annotations

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer


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


def whole(request: StageRequest, output: StageOutput) -> Payload | None:
    """All of the payload."""
    return output.payload


def texts_for(name: str) -> Transfer:
    """A transfer to one of several text encoders: of each item what is under its name."""

    def transfer(request: StageRequest, output: StageOutput) -> Payload | None:
        payload = output.payload or {}
        return {"texts": [item[name] for item in payload["texts"]]} if "texts" in payload else None

    return transfer


texts = picked("texts")
settings = picked("settings")
pictures = picked("pictures")
