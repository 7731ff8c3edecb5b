"""The model of a classifier: batches of texts through the library's model, to a number per class."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.engines.contract import LoadContext, Payload
from segue.models.registry import read_config
from segue.models.sequence_classifier import Row
from segue.models.sequence_labels import labels_of
from segue.models.sequence_stage import SequenceStage
from segue.models.text_classification.recipe import Activation, read_activation

_APPLIED: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "identity": lambda logits: logits,
}


class Classifier(SequenceStage):
    """Texts → `{"classes": [L] float32, "label": str}`."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for what cannot be read or served."""
        config = read_config(ctx.model_dir)
        self._labels = labels_of(config)
        self._apply = _APPLIED[read_activation(ctx.model_dir, config)]
        super().__init__(ctx)

    def answer(self, row: Row, logits: torch.Tensor) -> Payload:
        classes = self._apply(logits) if row.activated else logits
        return {"classes": classes, "label": self._labels[int(logits.argmax())]}
