"""The stage of a model for sequence classification: texts, or pairs of them, in one call, to a number per label.

B rows of a call, T tokens of the longest, L labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import InvalidRequest
from segue.models.shared.checkpoint.pretrained import load_config, load_model
from segue.models.shared.decoder.generation import whole_length
from segue.models.shared.library import AutoModelForSequenceClassification
from segue.models.shared.text.batches import bucket, padded

_UNBOUNDED = 1 << 31
"""Larger lengths are the library's placeholder for an unknown length."""


@dataclass(frozen=True, slots=True)
class Row:
    """A text, or two joined by their tokenizer."""

    ids: torch.Tensor
    """[tokens] long, on the CPU."""
    types: torch.Tensor | None = None
    """[tokens] long: which of the two texts a token belongs to, if the tokenizer returns it."""
    activated: bool = True
    """Whether to apply the activation to the logits."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The state of a request, from `begin` on."""

    request_id: str
    activated: bool


class SequenceClassifier:
    """The network of a checkpoint."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint."""
        config = load_config(ctx)
        config.use_cache = False
        self.model = load_model(ctx, config, AutoModelForSequenceClassification)
        pad = config.get_text_config().pad_token_id
        self._pad: int = pad if isinstance(pad, int) else 0
        # the library's models find a text's end by its padding: without a padding token they take one row at a time
        self._singly = not isinstance(pad, int)
        self._device = ctx.device

    def warm_up(self) -> None:
        """Classify one short text."""
        self.logits([Row(torch.ones(bucket(1), dtype=torch.long))])

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """[B, L] float32, on the CPU."""
        calls = [[row] for row in rows] if self._singly else [rows]
        return torch.cat([self._call(call) for call in calls])

    def _call(self, rows: Sequence[Row]) -> torch.Tensor:
        ids, mask = padded([row.ids for row in rows], self._pad)
        types = [row.types for row in rows if row.types is not None]
        more = {"token_type_ids": padded(types, 0)[0].to(self._device)} if len(types) == len(rows) else {}
        out = self.model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **more)
        return out.logits.float().cpu()


def asked_of(request: StageRequest) -> Asked:
    """The options of a request. Raises `InvalidRequest` for an invalid one."""
    activated = request.request.options.get("use_activation", True)
    if not isinstance(activated, bool):
        raise InvalidRequest(
            f"use_activation is {activated!r}; it must be true or false", field="options.use_activation"
        )
    return Asked(request.request_id, activated)


def longest_row(ctx: LoadContext, of_tokenizer: int | None) -> int:
    """Maximum tokens of a row: the limit of the model's positions, its tokenizer and the deployment. Raises
    `ConfigError`."""
    own = None if of_tokenizer is None or of_tokenizer >= _UNBOUNDED else of_tokenizer
    return whole_length(load_config(ctx), own, "tokenizer_config.json no model_max_length", ctx.max_model_len)


class SequenceStage(ABC):
    """`ModuleModel`: rows of similar length share a call. A family defines the result of the logits (`answer`)."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint or an unsupported model."""
        self.network = SequenceClassifier(ctx)

    def warm_up(self) -> None:
        """Classify one short text."""
        self.network.warm_up()

    def begin(self, request: StageRequest) -> tuple[Asked, list[Work]]:
        """Raises `InvalidRequest` for an invalid option."""
        return asked_of(request), []

    def feed(self, state: Asked, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The row's ids and, if the tokenizer returns them, token types → one item."""
        types = payload.get("token_type_ids")
        row = Row(payload["token_ids"].cpu(), None if types is None else types.cpu(), state.activated)
        length = len(row.ids)
        return [Work(state.request_id, row, bucket=bucket(length), cost=length, last=True)]

    def end(self, state: Asked) -> None:
        """Nothing to free: no state is kept per request."""

    def run(self, works: list[Work]) -> list[Result]:
        """Rows → the result of `answer` for each."""
        rows: list[Row] = [work.item for work in works]
        return [
            Result(self.answer(row, logits), prompt_tokens=len(row.ids))
            for row, logits in zip(rows, self.network.logits(rows), strict=True)
        ]

    @abstractmethod
    def answer(self, row: Row, logits: torch.Tensor) -> Payload:
        """The payload of one row; `logits`: [L] float32, on the CPU."""
