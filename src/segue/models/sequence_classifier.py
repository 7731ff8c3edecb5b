"""Models of the library for sequence classification: texts, or pairs of them, in one call, to a number per label.

B rows of a call, T tokens of the longest, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue.engines.contract import LoadContext, StageRequest
from segue.messages.errors import InvalidRequest
from segue.models.context_length import whole_length
from segue.models.library import AutoModelForSequenceClassification
from segue.models.pretrained import load_config, load_model
from segue.models.text_batches import bucket, padded

_UNBOUNDED = 1 << 31
"""Lengths above are the library's way to say that nobody knows."""


@dataclass(frozen=True, slots=True)
class Row:
    """A text, or two as their tokenizer joins them."""

    ids: torch.Tensor
    """[tokens] long, on the CPU."""
    types: torch.Tensor | None = None
    """[tokens] long: which of the two a token belongs to, where the tokenizer tells."""
    activated: bool = True
    """Whether the request wants more than the bare logits."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, from `begin` on."""

    request_id: str
    activated: bool


class SequenceClassifier:
    """The network of a checkpoint."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for what cannot be read."""
        config = load_config(ctx)
        config.use_cache = False
        self.model = load_model(ctx, config, AutoModelForSequenceClassification)
        pad = config.get_text_config().pad_token_id
        self._pad: int = pad if isinstance(pad, int) else 0
        # such models of the library take one row at a time: they find a text's end by its padding
        self._singly = not isinstance(pad, int)
        self._device = ctx.device

    def warm_up(self) -> None:
        """One short text."""
        self.logits([Row(torch.ones(bucket(1), dtype=torch.long))])

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """[B, L] float32, on the CPU."""
        calls = [[row] for row in rows] if self._singly else [rows]
        return torch.cat([self._call(call) for call in calls])

    def _call(self, rows: Sequence[Row]) -> torch.Tensor:
        ids, mask = padded([row.ids for row in rows], self._pad)
        types = [row.types for row in rows if row.types is not None]
        told = {"token_type_ids": padded(types, 0)[0].to(self._device)} if len(types) == len(rows) else {}
        out = self.model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **told)
        return out.logits.float().cpu()


def asked_of(request: StageRequest) -> Asked:
    """Raises `InvalidRequest` for an option that is none."""
    activated = request.request.options.get("use_activation", True)
    if not isinstance(activated, bool):
        raise InvalidRequest(
            f"use_activation is {activated!r}; it must be true or false", field="options.use_activation"
        )
    return Asked(request.request_id, activated)


def longest_row(ctx: LoadContext, of_tokenizer: int | None) -> int:
    """Tokens that it takes, as the model's positions, its tokenizer and the deployment allow it. Raises
    `ConfigError`."""
    own = None if of_tokenizer is None or of_tokenizer >= _UNBOUNDED else of_tokenizer
    return whole_length(load_config(ctx), own, "tokenizer_config.json no model_max_length", ctx.max_model_len)
