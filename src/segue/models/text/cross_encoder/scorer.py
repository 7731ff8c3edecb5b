"""The stage model of a cross-encoder: batches of text pairs → a score each."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext, Payload
from segue.models.registry import read_config
from segue.models.shared.text.sequence_classifier import Row, SequenceStage
from segue.models.text.cross_encoder.recipe import read_activation


class Scorer(SequenceStage):
    """Pairs → `{"score": float}`."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint or an unsupported model."""
        self._sigmoid = read_activation(ctx.model_dir, read_config(ctx.model_dir)) == "sigmoid"
        super().__init__(ctx)

    def answer(self, row: Row, logits: torch.Tensor) -> Payload:
        logit = logits[0]
        return {"score": float(logit.sigmoid() if self._sigmoid and row.activated else logit)}
