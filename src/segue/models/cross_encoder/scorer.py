"""The model of a cross-encoder: batches of pairs of texts through the library's model, to a number each."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext, Payload
from segue.models.cross_encoder.recipe import read_activation
from segue.models.registry import read_config
from segue.models.sequence_classifier import Row
from segue.models.sequence_stage import SequenceStage


class Scorer(SequenceStage):
    """Pairs → `{"score": float}`."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for what cannot be read or served."""
        self._sigmoid = read_activation(ctx.model_dir, read_config(ctx.model_dir)) == "sigmoid"
        super().__init__(ctx)

    def answer(self, row: Row, logits: torch.Tensor) -> Payload:
        logit = logits[0]
        return {"score": float(logit.sigmoid() if self._sigmoid and row.activated else logit)}
