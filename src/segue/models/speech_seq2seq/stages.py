"""The torch half of the family: what each stage is built with, and what leaves over each edge.

**input** makes of one request, one payload, final::

    {
      "token_ids": LongTensor [T],   # what the decoder begins with
      "times": bool,                 # its text has marks of time
      "detect": bool,                # one token is wanted: the language
      "window": {"hash": bytes, "frames": [bins, frames]},   # equal hash means equal content
    }

and `"tokens"` (`segue.models.prompt.client_tokens`) where the client asks for them: the worker takes it out.

**input → encoder** (`window`): `{"window": …}`. **input → llm** (`prompt_facts`): the payload without it.

**encoder → llm** (`whole`): `{"hash": bytes, "rows": [n, H]}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.speech_seq2seq.encoder import Encoder
from segue.models.speech_seq2seq.input import InputProcessor
from segue.models.speech_seq2seq.llm import LLM
from segue.models.transfers import whole


def window(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: what is heard."""
    return None if output.payload is None else {"window": output.payload["window"]}


def prompt_facts(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → llm: all but that."""
    if output.payload is None:
        return None
    return {name: value for name, value in output.payload.items() if name != "window"}


ADAPTERS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "encoder": Encoder, "llm": LLM}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): window,
    ("input", "llm"): prompt_facts,
    ("encoder", "llm"): whole,
}
