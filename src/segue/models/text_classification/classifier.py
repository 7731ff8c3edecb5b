"""The model of a classifier: batches of texts through the library's model, to a number per class."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.registry import read_config
from segue.models.sequence_classifier import Asked, Row, SequenceClassifier, asked_of
from segue.models.sequence_labels import labels_of
from segue.models.text_batches import bucket
from segue.models.text_classification.recipe import Activation, read_activation

_APPLIED: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "identity": lambda logits: logits,
}


class Classifier:
    """`ModuleAdapter`: one item per text, texts of like length in one call."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for what cannot be read or served."""
        config = read_config(ctx.model_dir)
        self._labels = labels_of(config)
        self._apply = _APPLIED[read_activation(ctx.model_dir, config)]
        self.network = SequenceClassifier(ctx)

    def warm_up(self) -> None:
        """One short text."""
        self.network.warm_up()

    def begin(self, request: StageRequest) -> tuple[Asked, list[Work]]:
        """Raises `InvalidRequest` for an option that is none."""
        return asked_of(request), []

    def feed(self, state: Asked, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The text's ids: one item."""
        row = Row(payload["token_ids"].cpu(), activated=state.activated)
        length = len(row.ids)
        return [Work(state.request_id, row, bucket=bucket(length), cost=length, last=True)]

    def end(self, state: Asked) -> None:
        """Nothing is kept per request."""

    def run(self, works: list[Work]) -> list[Result]:
        """Texts → `{"classes": [L] float32, "label": str}`."""
        rows: list[Row] = [work.item for work in works]
        results = []
        for row, logits in zip(rows, self.network.logits(rows), strict=True):
            classes = self._apply(logits) if row.activated else logits
            label = self._labels[int(logits.argmax())]
            results.append(Result({"classes": classes, "label": label}, prompt_tokens=len(row.ids)))
        return results
