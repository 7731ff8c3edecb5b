"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

Payloads, by edge. `T` text tokens, `D` numbers of a latent.

**input → backbone** (`prompt_ids`), one, final::

    {
      "token_ids": LongTensor [T],   # with one `audio_prompt_token_id` if there is a voice
      "voice": str,                  # its name; empty: none
      "frames_after_eos": int,       # frames after the one whose stop score ended the speech
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**backbone → vocoder** (`latent_rows`): `{"codes": FloatTensor [k, D], "start": int}`: k new latents, in the flow head's
normalised space; the first has index `start` in the request. Final when the backbone ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.engines.autoregressive.contract import numbers_of
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.speech.pocket_tts.backbone import Backbone
from segue.models.speech.pocket_tts.input import InputProcessor
from segue.models.speech.pocket_tts.vocoder import Vocoder


def prompt_ids(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → backbone: the text ids, and how to say them."""
    if output.payload is None:
        return None
    return {name: output.payload[name] for name in ("token_ids", "voice", "frames_after_eos")}


def latent_rows(request: StageRequest, output: TokenOutput) -> Payload | None:
    """backbone → vocoder: the latents of a step."""
    if not output.codes:
        return {"codes": torch.empty(0, 0), "start": output.first_index} if output.finished else None
    return {"codes": numbers_of(torch.tensor(output.codes)[:, 1:]), "start": output.first_index}


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": InputProcessor,
    "backbone": Backbone,
    "vocoder": Vocoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "backbone"): prompt_ids,
    ("backbone", "vocoder"): latent_rows,
}
