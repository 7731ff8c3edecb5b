"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

T prompt tokens, n rows of one unit, L layers that get deep features (mostly 0), H hidden size.

**input** returns for one request one payload, final::

    {
      "token_ids": LongTensor [T],       # placeholders already repeated once per row; -1: a row of "embeds"
      ["embeds": Tensor [e, H],]         # the rows that the client gave as embeddings, in order
      ["positions": LongTensor [3, T], "position_delta": int,]     # models with M-RoPE, prompts with media
      "media": [                         # units (`segue.models.omni.multimodal_lm.units`): a medium, or all of its kind
        {"kind": str, "hash": bytes,     # equal hash means equal rows
         "places": LongTensor [n],       # where its rows stand in the prompt
         "ids": LongTensor [n], "tensors": {…}, "alone": bool},
      ],
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`media_tensors`): `{"media": [as above]}`. **input → llm** (`prompt_facts`): the same payload
without `ids`, `tensors` and `alone`.

**encoder → llm** (`whole`): one chunk per unit, in order:
`{"media": [{"kind": str, "hash": bytes, "rows": [n, 1 + L, H]}]}`.

For a decoder with cross-attention to images, an image is one token ("places" and "ids" are [1]), its rows replace no
token (`"rows": [n, H]`), and the input stage states how many tiles of each of m images a token sees:
`"seen": LongTensor [T, m], "tiles": int` (`segue.models.omni.multimodal_lm.cross.shown`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import LoadContext, Payload, StageOutput, StageRequest, Transfer
from segue.models.omni.multimodal_lm.cross.llm import CrossEncoder, CrossInput, CrossLLM
from segue.models.omni.multimodal_lm.encoder import Encoder
from segue.models.omni.multimodal_lm.input import InputProcessor
from segue.models.omni.multimodal_lm.llm import LLM
from segue.models.omni.multimodal_lm.loading import layers_across
from segue.models.omni.multimodal_lm.units import without_tensors
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.transfers import whole


def media_tensors(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the media tensors."""
    return None if output.payload is None else {"media": output.payload["media"]}


def prompt_facts(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → llm: everything except the media tensors."""
    if output.payload is None:
        return None
    return {**output.payload, "media": [without_tensors(unit) for unit in output.payload["media"]]}


def _input(ctx: LoadContext) -> InputProcessor:
    return CrossInput(ctx) if layers_across(load_config(ctx)) else InputProcessor(ctx)


def _encoder(ctx: LoadContext) -> Encoder:
    return CrossEncoder(ctx) if layers_across(load_config(ctx)) else Encoder(ctx)


def _llm(ctx: AutoregressiveContext) -> LLM:
    return CrossLLM(ctx) if layers_across(load_config(ctx)) else LLM(ctx)


STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": _input, "encoder": _encoder, "llm": _llm}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): media_tensors,
    ("input", "llm"): prompt_facts,
    ("encoder", "llm"): whole,
}
