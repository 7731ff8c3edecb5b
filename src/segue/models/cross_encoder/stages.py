"""The torch half of the family: what each stage is built with, and what leaves over the one edge.

**input → scorer** (`pair`): `{"token_ids": LongTensor [T], "token_type_ids": LongTensor [T]}`, one payload, final; the
second where the tokenizer gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.cross_encoder.input import InputProcessor
from segue.models.cross_encoder.scorer import Scorer


def pair(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → scorer: the ids of both texts."""
    return output.payload


ADAPTERS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "scorer": Scorer}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "scorer"): pair}
