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

**backbone → vocoder** (`rows_without_end`): `{"codes": LongTensor [k, K], "start": int}`: k new rows of codes; the
first has index `start` in the request. The row that ends the utterance is not sent if all its codes are the end's.
Final when the backbone ends (k may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.shared.speech.transfers import prompt_ids, recordings, rows_without_end
from segue.models.shared.transfers import whole
from segue.models.speech.csm.backbone import Backbone
from segue.models.speech.csm.codec import Vocoder
from segue.models.speech.csm.encoder import Encoder
from segue.models.speech.csm.input import InputProcessor

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
    ("backbone", "vocoder"): rows_without_end,
}
