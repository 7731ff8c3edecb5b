"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

**input** returns for one request one payload, final::

    {
      "token_ids": LongTensor [T],   # the decoder's prompt
      "times": bool,                 # its text has marks of time
      "detect": bool,                # one token is wanted: the language
      "window": {"hash": bytes, "frames": [bins, frames]},   # equal hash means equal content
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`window`): `{"window": …}`. **input → llm** (`prompt_facts`): the payload without it.

**encoder → llm** (`whole`): `{"hash": bytes, "rows": [n, H]}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.shared.transfers import whole
from segue.models.speech.speech_seq2seq.encoder import Encoder
from segue.models.speech.speech_seq2seq.input import InputProcessor
from segue.models.speech.speech_seq2seq.llm import LLM


def window(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the spectrogram window."""
    return None if output.payload is None else {"window": output.payload["window"]}


def prompt_facts(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → llm: everything except the window."""
    if output.payload is None:
        return None
    return {name: value for name, value in output.payload.items() if name != "window"}


STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "encoder": Encoder, "llm": LLM}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): window,
    ("input", "llm"): prompt_facts,
    ("encoder", "llm"): whole,
}
