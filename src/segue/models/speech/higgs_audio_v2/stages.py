"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

Payloads, by edge. `T` text tokens, `K` codebooks.

**input → llm** (`whole`): what `InputProcessor` makes of one request, one payload, final:
`{"token_ids": LongTensor [T]}`, and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client
requested them: the worker removes this entry.

**llm → vocoder** (`rows_without_end`): `{"codes": LongTensor [k, K], "start": int}`: k new rows of delayed codes; the
first has index `start` in the request. The row that ends the utterance, which has the end of the stream in all
codebooks, is not sent. Final when the language model ends (k may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.shared.speech.transfers import rows_without_end
from segue.models.shared.transfers import whole
from segue.models.speech.higgs_audio_v2.input import InputProcessor
from segue.models.speech.higgs_audio_v2.llm import LLM
from segue.models.speech.higgs_audio_v2.vocoder import Vocoder

STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "llm": LLM, "vocoder": Vocoder}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "llm"): whole, ("llm", "vocoder"): rows_without_end}
