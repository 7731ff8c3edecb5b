"""The stage model of a classifier: batches of texts → a number per class."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.engines.contract import LoadContext, Payload
from segue.models.registry import read_config
from segue.models.shared.text.family import labels_of
from segue.models.shared.text.sequence_classifier import Row, SequenceStage
from segue.models.text.text_classification.recipe import Activation, read_activation

APPLIED: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "identity": lambda logits: logits,
}


class Classifier(SequenceStage):
    """Texts → `{"classes": [L] float32, "label": str}`."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint or an unsupported model."""
        config = read_config(ctx.model_dir)
        self._labels = labels_of(config)
        self._apply = APPLIED[read_activation(ctx.model_dir, config)]
        super().__init__(ctx)

    def answer(self, row: Row, logits: torch.Tensor) -> Payload:
        classes = self._apply(logits) if row.activated else logits
        return {"classes": classes, "label": self._labels[int(logits.argmax())]}
