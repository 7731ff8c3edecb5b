"""The model of a cross-encoder: batches of pairs of texts through the library's model, to a number each."""

from __future__ import annotations

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.cross_encoder.recipe import read_activation
from segue.models.registry import read_config
from segue.models.sequence_classifier import Asked, Row, SequenceClassifier, asked_of
from segue.models.text_batches import bucket


class Scorer:
    """`ModuleAdapter`: one item per pair, pairs of like length in one call."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for what cannot be read or served."""
        self._sigmoid = read_activation(ctx.model_dir, read_config(ctx.model_dir)) == "sigmoid"
        self.network = SequenceClassifier(ctx)

    def warm_up(self) -> None:
        """One short pair."""
        self.network.warm_up()

    def begin(self, request: StageRequest) -> tuple[Asked, list[Work]]:
        """Raises `InvalidRequest` for an option that is none."""
        return asked_of(request), []

    def feed(self, state: Asked, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The pair's ids: one item."""
        types = payload.get("token_type_ids")
        pair = Row(payload["token_ids"].cpu(), None if types is None else types.cpu(), state.activated)
        length = len(pair.ids)
        return [Work(state.request_id, pair, bucket=bucket(length), cost=length, last=True)]

    def end(self, state: Asked) -> None:
        """Nothing is kept per request."""

    def run(self, works: list[Work]) -> list[Result]:
        """Pairs → `{"score": float}`."""
        pairs: list[Row] = [work.item for work in works]
        results = []
        for pair, logit in zip(pairs, self.network.logits(pairs)[:, 0], strict=True):
            score = logit.sigmoid() if self._sigmoid and pair.activated else logit
            results.append(Result({"score": float(score)}, prompt_tokens=len(pair.ids)))
        return results
