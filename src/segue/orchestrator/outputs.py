"""A finished request as a Python caller gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segue.messages.deltas import (
    AudioDelta,
    Delta,
    Finished,
    ImageDelta,
    RequestMetrics,
    TextDelta,
    TokenLogprobs,
    Usage,
)


@dataclass(slots=True)
class Audio:
    """[samples] float32 mono in [-1, 1]."""

    samples: np.ndarray
    sample_rate: int


@dataclass(slots=True)
class RequestOutput:
    """Everything one request gave."""

    request_id: str
    text: str = ""
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    """By autoregressive stage, end token included."""
    audio: Audio | None = None
    images: list[Any] = field(default_factory=list)
    """PIL images."""
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Beside the ids of the stage that talks, where asked for."""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One per prompt token, None for the first, where asked for."""
    usage: Usage = field(default_factory=Usage)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class Collector:
    """Puts deltas together."""

    def __init__(self, request_id: str, *, wants_audio: bool, sample_rate: int = 24000) -> None:
        self._output = RequestOutput(request_id)
        self._text: list[str] = []
        self._samples: list[np.ndarray] = []
        self._rate = sample_rate
        self._wants_audio = wants_audio

    def add(self, delta: Delta) -> None:
        match delta:
            case TextDelta():
                self._text.append(delta.text)
                self._output.logprobs += delta.logprobs
                self._output.prompt_token_ids += delta.prompt_token_ids
                self._output.prompt_logprobs += delta.prompt_logprobs
            case AudioDelta():
                self._samples.append(delta.array)
                self._rate = delta.sample_rate
            case ImageDelta():
                from PIL import Image

                self._output.images.append(Image.fromarray(delta.array))
            case Finished():
                self._output.finish_reason = delta.finish_reason
                self._output.token_ids = delta.token_ids
                self._output.usage = delta.usage
                self._output.metrics = delta.metrics

    def output(self) -> RequestOutput:
        self._output.text = "".join(self._text)
        if self._wants_audio:
            samples = np.concatenate(self._samples) if self._samples else np.zeros(0, dtype=np.float32)
            self._output.audio = Audio(samples, self._rate)
        return self._output
