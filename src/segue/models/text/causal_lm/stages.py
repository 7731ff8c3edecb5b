"""The torch half of the family: the stage model of each stage, and the transfer of its only edge.

**input → llm** (`whole`): `{"token_ids": LongTensor [T]}`, one payload, final.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.shared.transfers import whole
from segue.models.text.causal_lm.input import InputProcessor
from segue.models.text.causal_lm.llm import LLM

STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "llm": LLM}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "llm"): whole}
