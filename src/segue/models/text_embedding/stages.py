"""The torch half of the family: what each stage is built with, and what leaves over the one edge.

**input → embedder** (`text`): `{"token_ids": LongTensor [T]}`, one payload, final.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Payload, StageOutput, StageRequest, Transfer
from segue.models.text_embedding.embedder import Embedder
from segue.models.text_embedding.input import InputProcessor


def text(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → embedder: the text's ids."""
    return output.payload


ADAPTERS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "embedder": Embedder}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "embedder"): text}
