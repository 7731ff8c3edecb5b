"""The torch half of the family: the stage model of each stage, and the transfer of its only edge.

**input → scorer** (`whole`): `{"token_ids": LongTensor [T], "token_type_ids": LongTensor [T]}`, one payload, final; the
second only if the tokenizer returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.shared.transfers import whole
from segue.models.text.cross_encoder.input import InputProcessor
from segue.models.text.cross_encoder.scorer import Scorer

STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "scorer": Scorer}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "scorer"): whole}
