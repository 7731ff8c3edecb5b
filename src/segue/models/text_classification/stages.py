"""The torch half of the family: what each stage is built with, and what leaves over the one edge.

**input → classifier** (`text`): `{"token_ids": LongTensor [T]}`, one payload, final.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.text_classification.classifier import Classifier
from segue.models.text_classification.input import InputProcessor


def text(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → classifier: the text's ids."""
    return output.payload


ADAPTERS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "classifier": Classifier}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "classifier"): text}
