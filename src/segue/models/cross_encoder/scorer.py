"""The model of a cross-encoder: batches of pairs of texts through the library's model, to a number each.

B pairs of a call, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import InvalidRequest
from segue.models.cross_encoder.recipe import read_activation
from segue.models.library import AutoModelForSequenceClassification
from segue.models.pretrained import load_config, load_model
from segue.models.registry import read_config
from segue.models.text_batches import bucket, padded


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two texts as one row."""

    ids: torch.Tensor
    """[tokens] long, on the CPU."""
    types: torch.Tensor | None
    """[tokens] long: which of the two a token belongs to, where the tokenizer tells."""
    activated: bool


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, from `begin` on."""

    request_id: str
    activated: bool


class Scorer:
    """`ModuleAdapter`: one item per pair, pairs of like length in one call."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for what cannot be read or served."""
        config = load_config(ctx)
        self._sigmoid = read_activation(ctx.model_dir, read_config(ctx.model_dir)) == "sigmoid"
        config.use_cache = False
        self._model = load_model(ctx, config, AutoModelForSequenceClassification)
        pad = config.get_text_config().pad_token_id
        self._pad: int = pad if isinstance(pad, int) else 0
        # such models of the library take one row at a time: they find a text's end by its padding
        self._singly = not isinstance(pad, int)
        self._device = ctx.device

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One short pair."""
        self._logits([_Pair(torch.ones(bucket(1), dtype=torch.long), None, activated=True)])

    def begin(self, request: StageRequest) -> tuple[_Asked, list[Work]]:
        """Raises `InvalidRequest` for an option that is none."""
        asked = request.request.options.get("use_activation", True)
        if not isinstance(asked, bool):
            raise InvalidRequest(
                f"use_activation is {asked!r}; it must be true or false", field="options.use_activation"
            )
        return _Asked(request.request_id, asked), []

    def feed(self, state: _Asked, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The pair's ids: one item."""
        types = payload.get("token_type_ids")
        pair = _Pair(payload["token_ids"].cpu(), None if types is None else types.cpu(), state.activated)
        length = len(pair.ids)
        return [Work(state.request_id, pair, bucket=bucket(length), cost=length, last=True)]

    def end(self, state: _Asked) -> None:
        """Nothing is kept per request."""

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Pairs → `{"score": float}`."""
        pairs: list[_Pair] = [work.item for work in works]
        calls = [[pair] for pair in pairs] if self._singly else [pairs]
        logits = torch.cat([self._logits(call) for call in calls])
        results = []
        for pair, logit in zip(pairs, logits, strict=True):
            score = logit.sigmoid() if self._sigmoid and pair.activated else logit
            results.append(Result({"score": float(score)}, prompt_tokens=len(pair.ids)))
        return results

    def _logits(self, pairs: Sequence[_Pair]) -> torch.Tensor:
        """[B] float32, on the CPU."""
        ids, mask = padded([pair.ids for pair in pairs], self._pad)
        types = [pair.types for pair in pairs if pair.types is not None]
        told = {"token_type_ids": padded(types, 0)[0].to(self._device)} if len(types) == len(pairs) else {}
        out = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **told)
        return out.logits[:, 0].float().cpu()
