"""Base class of a stage model that wraps another stage model.

Optional reading: for stage models that wrap another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.engines.autoregressive.contract import (
    AutoregressiveModel,
    DrawsByHead,
    EndsByRow,
    Fed,
    SpeaksAtTimes,
    YieldsRows,
)
from segue.engines.contract import HasVoices, Payload, StageRequest


class Wrapped:
    """Forwards everything of an `AutoregressiveModel` except its network to `inner`. A subclass adds `embed`,
    `forward`, `logits` and, for inner stage models that yield rows of codes, `advance`."""

    def __init__(self, inner: AutoregressiveModel) -> None:
        self.inner = inner
        self.device = inner.device
        self.kv = inner.kv
        self.axes = inner.axes
        self.vocab_size = inner.vocab_size
        self.max_model_len = inner.max_model_len
        self.weight_bytes = inner.weight_bytes
        self.conditioned = inner.conditioned
        self.end_token_ids = inner.end_token_ids
        self.default_sampling = inner.default_sampling
        self.vocabulary = inner.vocabulary
        if isinstance(inner, HasVoices):
            self.voices = inner.voices
        if isinstance(inner, YieldsRows):
            self.groups = inner.groups  # with `advance`, it then yields rows as well
        if isinstance(inner, DrawsByHead):
            self.looks_back, self.draws_per_row = inner.looks_back, inner.draws_per_row
        if isinstance(inner, SpeaksAtTimes):
            self.silent, self.speaks = inner.silent, inner.speaks
        if isinstance(inner, EndsByRow):
            self.ends = inner.ends

    def begin(self, request: StageRequest) -> Any:
        return self.inner.begin(request)

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        return self.inner.feed(state, upstream, payload, final=final)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.inner.decode_text(token_ids, skip_special_tokens=skip_special_tokens)
