"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

Payloads, by edge. `T` text tokens, `G` frames of a patch, `K` codes of a frame.

**input → (both below)**: what `InputProcessor` makes of one request, one payload, final::

    {
      "token_ids": LongTensor [T],     # an `<|empty|>` per patch of a recording
      "media": [{"hash": bytes,        # equal hash means equal samples
                 "samples": FloatTensor [samples]}],   # at the audio tokenizer's rate; in prompt order
      "replies": [{"after": int,       # of a request that goes on from others: recordings before a reply of theirs
                   "codes": LongTensor [patches, G · K]}],   # in prompt order
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`recordings`): `{"media": [as above]}`. **input → llm** (`prompt`): the ids and `"replies"`.

**encoder → llm** (`whole`): one chunk per recording:
`{"media": [{"index": int, "codes": LongTensor [patches, G · K]}]}`.

**llm → vocoder** (`patches`): `{"codes": LongTensor [k, G · K], "start": int}`: the patches of k new rows; the first
has index `start` in the request. Those of text are of empty codes. Final when the language model ends (k may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.shared.speech.transfers import recordings
from segue.models.shared.transfers import whole
from segue.models.speech.mimo_audio.encoder import RecordingEncoder
from segue.models.speech.mimo_audio.input import InputProcessor
from segue.models.speech.mimo_audio.llm import LLM
from segue.models.speech.mimo_audio.vocoder import Vocoder


def prompt(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → llm: all but the recordings."""
    return None if output.payload is None else {key: output.payload[key] for key in ("token_ids", "replies")}


def patches(request: StageRequest, output: TokenOutput) -> Payload | None:
    """llm → vocoder: the patches of a step's rows."""
    if not output.codes and not output.finished:
        return None
    return {"codes": torch.tensor([row[1:] for row in output.codes], dtype=torch.long), "start": output.first_index}


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": InputProcessor,
    "encoder": RecordingEncoder,
    "llm": LLM,
    "vocoder": Vocoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): recordings,
    ("input", "llm"): prompt,
    ("encoder", "llm"): whole,
    ("llm", "vocoder"): patches,
}
