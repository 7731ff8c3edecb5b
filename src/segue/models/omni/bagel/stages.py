"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

T prompt tokens, n patches of an image, H hidden size, C channels of the VAE's latents.

**input** returns for one request one payload, final. For a reply::

    {
      "token_ids": LongTensor [T],       # <|image_pad|> for each patch
      "positions": LongTensor [1, T],    # all tokens of an image, its marks included, have the same one
      "position_delta": int,             # of generated tokens
      "media": [{"kind": "image", "hash": bytes,
                 "span": (int, int),     # the tokens of the image, its marks included
                 "patches": [n, 3 · size²] float32 in [-1, 1], "grid": (int, int)}],  # down, across
    }

For an image::

    {
      "passages": [[int, …] | int, …],   # in order: token ids of a text with its marks; the number of an image
      "media": [{"kind", "hash", "patches", "grid",
                 "pixels": [3, h, w] float32 in [-1, 1], "latents_hash": bytes}],  # as the VAE sees it
      "drawing": {…},                    # `drawing.Drawing` as plain values
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`images`): the patches. **input → vae_encoder** (`edited`): the pixels. **input → llm**
(`prompt_facts`): the rest. **encoder → llm** (`whole`): one chunk per image, in order:
`{"media": [{"hash": bytes, "rows": [n, H]}]}`. **vae_encoder → llm** (`whole`): `{"images": [{"mean", "std"}]}`,
[C, h, w] each. **llm → denoiser** (`whole`): `{"lease": int, "views": [[sequence, length, position], …]}`, the contexts
(`reading`), whose blocks the denoiser asks of the engine, and `"drawing"`. **denoiser → decoder** (`whole`): as in
`segue.models.shared.diffusion.transfers`.

With `drawing.images`, texts and images alternate: **decoder → drawn_encoder, drawn_vae_encoder** (`drawn`): the image.
**drawn_encoder, drawn_vae_encoder → llm** (`whole`): as from the other two, and `"hashes": [bytes]`, of what determines
the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.omni.bagel.drawing.denoiser import ImageDenoiser
from segue.models.omni.bagel.drawing.vae import LatentDecoder, LatentEncoder
from segue.models.omni.bagel.encoder import Encoder
from segue.models.omni.bagel.input import InputProcessor
from segue.models.omni.bagel.llm import LLM
from segue.models.omni.bagel.prompt.drawn import DrawnEncoder, DrawnLatentEncoder
from segue.models.shared.transfers import whole


def images(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the patches."""
    if output.payload is None:
        return None
    return {"media": [_only(image, "hash", "patches", "grid") for image in output.payload["media"]]}


def edited(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → vae_encoder: the pixels."""
    if output.payload is None:
        return None
    return {"images": [image["pixels"] for image in output.payload["media"]]}


def prompt_facts(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → llm: everything except patches and pixels."""
    if output.payload is None:
        return None
    media = [_only(image, "hash", "span", "latents_hash") for image in output.payload["media"]]
    return {**output.payload, "media": media}


def drawn(request: StageRequest, output: StageOutput) -> Payload | None:
    """decoder → what reads the image again: the image, but no preview of it."""
    if output.payload is None or output.payload.get("partial") is not None:
        return None
    return {"image": output.payload["image"]}


def _only(image: Payload, *keys: str) -> Payload:
    return {key: image[key] for key in keys if key in image}


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": InputProcessor,
    "encoder": Encoder,
    "vae_encoder": LatentEncoder,
    "llm": LLM,
    "denoiser": ImageDenoiser,
    "decoder": LatentDecoder,
    "drawn_encoder": DrawnEncoder,
    "drawn_vae_encoder": DrawnLatentEncoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): images,
    ("input", "vae_encoder"): edited,
    ("input", "llm"): prompt_facts,
    ("encoder", "llm"): whole,
    ("vae_encoder", "llm"): whole,
    ("llm", "denoiser"): whole,
    ("denoiser", "decoder"): whole,
    ("decoder", "drawn_encoder"): drawn,
    ("decoder", "drawn_vae_encoder"): drawn,
    ("drawn_encoder", "llm"): whole,
    ("drawn_vae_encoder", "llm"): whole,
}
