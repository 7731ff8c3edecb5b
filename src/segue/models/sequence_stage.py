"""The stage of a model for sequence classification: a text, or a pair of them, is one item of a batched call."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.sequence_classifier import Asked, Row, SequenceClassifier, asked_of
from segue.models.text_batches import bucket


class SequenceStage(ABC):
    """`ModuleAdapter`: rows of like length in one call. A family says what becomes of the logits."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for what cannot be read or served."""
        self.network = SequenceClassifier(ctx)

    def warm_up(self) -> None:
        """One short text."""
        self.network.warm_up()

    def begin(self, request: StageRequest) -> tuple[Asked, list[Work]]:
        """Raises `InvalidRequest` for an option that is none."""
        return asked_of(request), []

    def feed(self, state: Asked, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The row's ids, and of which of two texts each is where the tokenizer tells: one item."""
        types = payload.get("token_type_ids")
        row = Row(payload["token_ids"].cpu(), None if types is None else types.cpu(), state.activated)
        length = len(row.ids)
        return [Work(state.request_id, row, bucket=bucket(length), cost=length, last=True)]

    def end(self, state: Asked) -> None:
        """Nothing is kept per request."""

    def run(self, works: list[Work]) -> list[Result]:
        """Rows → what `answer` makes of each."""
        rows: list[Row] = [work.item for work in works]
        return [
            Result(self.answer(row, logits), prompt_tokens=len(row.ids))
            for row, logits in zip(rows, self.network.logits(rows), strict=True)
        ]

    @abstractmethod
    def answer(self, row: Row, logits: torch.Tensor) -> Payload:
        """The payload of one row; `logits`: [L] float32, on the CPU."""
