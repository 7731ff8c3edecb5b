"""The torch half of the family. The input stage gives `{"arguments": {name: value}, "pictures": {name: tensor or
[tensor, …]}, "outputs": int, "scheduler": str | None, "steps": int, "fps": float}`; pictures are [h, w, 3] uint8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import whole
from segue.models.generic_pipeline.graph import STAGE
from segue.models.generic_pipeline.input import Input
from segue.models.generic_pipeline.pipeline import WholePipeline

ADAPTERS: dict[str, Callable[..., Any]] = {"input": Input, STAGE: WholePipeline}
TRANSFERS: dict[tuple[str, str], Transfer] = {("input", STAGE): whole}
