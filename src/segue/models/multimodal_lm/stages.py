"""The torch half of the family: what each stage is built with, and what leaves over each edge.

T prompt tokens, n rows of one unit, L layers that get deep features (mostly 0), H hidden size.

**input** makes of one request, one payload, final::

    {
      "token_ids": LongTensor [T],       # placeholders already repeated once per row
      ["positions": LongTensor [3, T], "position_delta": int,]     # models with M-RoPE, prompts with media
      "media": [                         # units (`segue.models.multimodal_lm.units`): a medium, or all of its kind
        {"kind": str, "hash": bytes,     # equal hash means equal rows
         "places": LongTensor [n],       # where its rows stand in the prompt
         "ids": LongTensor [n], "tensors": {…}, "alone": bool},
      ],
    }

and `"tokens"` (`segue.models.prompt.client_tokens`) where the client asks for them: the worker takes it out.

**input → encoder** (`media_tensors`): `{"media": [as above]}`. **input → llm** (`prompt_facts`): the same payload
without `ids`, `tensors` and `alone`.

**encoder → llm** (`whole`): one chunk per unit, in order:
`{"media": [{"kind": str, "hash": bytes, "rows": [n, 1 + L, H]}]}`.

Where a decoder looks at pictures by cross-attention, a picture is one token ("places" and "ids" are [1]), its rows go
to no token (`"rows": [n, H]`), and the input stage says how many tiles of each of m pictures a token sees:
`"seen": LongTensor [T, m], "tiles": int` (`segue.models.multimodal_lm.shown`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import LoadContext, Payload, StageOutput, StageRequest, Transfer
from segue.models.multimodal_lm.cross import CrossEncoder, CrossInput, CrossLLM
from segue.models.multimodal_lm.encoder import Encoder
from segue.models.multimodal_lm.input import InputProcessor
from segue.models.multimodal_lm.llm import LLM
from segue.models.multimodal_lm.loading import layers_across
from segue.models.multimodal_lm.units import without_tensors
from segue.models.pretrained import load_config
from segue.models.transfers import whole


def media_tensors(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the media."""
    return None if output.payload is None else {"media": output.payload["media"]}


def prompt_facts(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → llm: all but the media's tensors."""
    if output.payload is None:
        return None
    return {**output.payload, "media": [without_tensors(unit) for unit in output.payload["media"]]}


def _input(ctx: LoadContext) -> InputProcessor:
    return CrossInput(ctx) if layers_across(load_config(ctx)) else InputProcessor(ctx)


def _encoder(ctx: LoadContext) -> Encoder:
    return CrossEncoder(ctx) if layers_across(load_config(ctx)) else Encoder(ctx)


def _llm(ctx: LoadContext) -> LLM:
    return CrossLLM(ctx) if layers_across(load_config(ctx)) else LLM(ctx)


ADAPTERS: dict[str, Callable[..., Any]] = {"input": _input, "encoder": _encoder, "llm": _llm}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): media_tensors,
    ("input", "llm"): prompt_facts,
    ("encoder", "llm"): whole,
}
