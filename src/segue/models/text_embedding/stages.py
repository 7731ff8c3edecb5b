"""The torch half of the family: what each stage is built with, and what leaves over the one edge.

**input → embedder** (`whole`): `{"token_ids": LongTensor [T]}`, one payload, final.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.text_embedding.embedder import Embedder
from segue.models.text_embedding.input import InputProcessor
from segue.models.transfers import whole

ADAPTERS: dict[str, Callable[..., Any]] = {"input": InputProcessor, "embedder": Embedder}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", "embedder"): whole}
