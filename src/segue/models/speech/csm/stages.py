"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

Payloads, by edge. `T` text tokens, `K` codes per row.

**input → (both below)**: what `InputProcessor` makes of one request, one payload, final::

    {
      "token_ids": LongTensor [T],     # one `audio_token_id` per recording
      "media": [{"hash": bytes,        # equal hash means equal samples
                 "samples": FloatTensor [samples]}],   # at the codec's rate; in prompt order
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`recordings`): `{"media": [as above]}`. **input → backbone** (`prompt_ids`): `{"token_ids": …}`.

**encoder → backbone** (`whole`): one chunk per recording:
`{"media": [{"index": int, "codes": LongTensor [frames, K]}]}`.

**backbone → vocoder** (`code_rows`): `{"codes": LongTensor [k, K], "start": int}`: k new rows of codes; the first has
index `start` in the request. The row that ends the utterance is not sent if all its codes are the end's. Final when the
backbone ends (k may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.shared.transfers import whole
from segue.models.speech.csm.backbone import Backbone
from segue.models.speech.csm.codec import Vocoder
from segue.models.speech.csm.encoder import Encoder
from segue.models.speech.csm.input import InputProcessor


def recordings(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the recordings."""
    return None if output.payload is None else {"media": output.payload["media"]}


def prompt_ids(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → backbone: the text ids."""
    return None if output.payload is None else {"token_ids": output.payload["token_ids"]}


def code_rows(request: StageRequest, output: TokenOutput) -> Payload | None:
    """backbone → vocoder: the rows of codes of a step."""
    codes = output.codes
    # all codes but the last are known to be the end's
    if output.finish_reason == "stop" and codes and len(set(codes[-1])) == 1:
        codes = codes[:-1]
    if not codes and not output.finished:
        return None
    return {"codes": torch.tensor(codes, dtype=torch.long), "start": output.first_index}


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": InputProcessor,
    "encoder": Encoder,
    "backbone": Backbone,
    "vocoder": Vocoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): recordings,
    ("input", "backbone"): prompt_ids,
    ("encoder", "backbone"): whole,
    ("backbone", "vocoder"): code_rows,
}
