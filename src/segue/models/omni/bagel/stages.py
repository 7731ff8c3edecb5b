"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

T prompt tokens, n patches of an image, H hidden size.

**input** returns for one request one payload, final::

    {
      "token_ids": LongTensor [T],       # <|image_pad|> for each patch
      "positions": LongTensor [1, T],    # all tokens of an image, its marks included, have the same one
      "position_delta": int,             # of generated tokens
      "media": [{"kind": "image", "hash": bytes,
                 "span": (int, int),     # the tokens of the image, its marks included
                 "patches": [n, 3 · size²] float32 in [-1, 1], "grid": (int, int)}],  # down, across
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`images`): the media without `span`. **input → llm** (`prompt_facts`): the payload without patches.
**encoder → llm** (`whole`): one chunk per image, in order: `{"media": [{"hash": bytes, "rows": [n, H]}]}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.omni.bagel.encoder import Encoder
from segue.models.omni.bagel.input import InputProcessor
from segue.models.omni.bagel.llm import LLM
from segue.models.shared.transfers import whole


def images(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the patches."""
    if output.payload is None:
        return None
    return {"media": [_only(image, "hash", "patches", "grid") for image in output.payload["media"]]}


def prompt_facts(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → llm: everything except the patches."""
    if output.payload is None:
        return None
    return {**output.payload, "media": [_only(image, "hash", "span") for image in output.payload["media"]]}


def _only(image: Payload, *keys: str) -> Payload:
    return {key: image[key] for key in keys}


STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "encoder": Encoder, "llm": LLM}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): images,
    ("input", "llm"): prompt_facts,
    ("encoder", "llm"): whole,
}
