"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

**input → talker** (`whole`): one payload, final unless the request is open: T positions of the prompt, each a text
token, most with a codec token whose embedding is added::

    {"text_ids": LongTensor [T], "codec_ids": LongTensor [T]}     # codec id -1: none

An open request has `"following": LongTensor [n]` besides: the ids of its text after the first, which is in the prompt.
Further payloads have the ids of what was appended, `{"following": …}`; the last, final, has none.

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**talker → vocoder** (`code_rows`): `{"codes": LongTensor [k, G], "start": int}`: k new rows of G codes; the first has
index `start` in the request. The row of the talker's last token is not sent: in the reference it has no codes. Final
when the talker ends (k may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.shared.speech.transfers import code_rows
from segue.models.shared.transfers import whole
from segue.models.speech.qwen3_tts.input import InputProcessor
from segue.models.speech.qwen3_tts.talker import Talker
from segue.models.speech.qwen3_tts.vocoder import Vocoder

STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "talker": Talker, "vocoder": Vocoder}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "talker"): whole, ("talker", "vocoder"): code_rows}
