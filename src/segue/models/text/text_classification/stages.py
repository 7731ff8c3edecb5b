"""The torch half of the family: the stage model of each stage, and the transfer of its only edge.

**input → classifier** (`whole`): `{"token_ids": LongTensor [T]}`, one payload, final.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.shared.transfers import whole
from segue.models.text.text_classification.classifier import Classifier
from segue.models.text.text_classification.input import InputProcessor

STAGE_MODELS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "classifier": Classifier}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "classifier"): whole}
