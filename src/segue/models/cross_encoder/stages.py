"""The torch half of the family: what each stage is built with, and what leaves over the one edge.

**input → scorer** (`whole`): `{"token_ids": LongTensor [T], "token_type_ids": LongTensor [T]}`, one payload, final; the
second where the tokenizer gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.cross_encoder.input import InputProcessor
from segue.models.cross_encoder.scorer import Scorer
from segue.models.transfers import whole

ADAPTERS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "scorer": Scorer}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "scorer"): whole}
