"""The outcome of a request of `segue bench omni`, on any side."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from segue.bench.harness.load import LoadDriver, LoadSlice
from segue.bench.harness.scenarios import LoadOutcome
from segue.bench.harness.stages import Span
from segue.bench.omni.workload import BenchRequest

FIRST_AUDIO_SECONDS = 0.08
"""Audio counts as started after this duration: a header or a click does not."""


class Outcome(LoadOutcome, kw_only=True):
    """One answered request. Times are seconds since the client sent it."""

    kind: str
    ttft: float
    """First token of the reply."""
    ttfa: float
    """First 80 ms of audio that is not silence."""
    audio_seconds: float
    prompt_tokens: int
    text_ids: list[int]
    codes: int
    """Number of the talker's codes."""
    code_ids: list[int] = msgspec.field(default_factory=list)
    """The talker's codes."""
    batch: int = 1
    """Requests that were served together with it from start to end (static batches)."""
    rms: float
    """Loudness of the whole waveform."""
    spans: list[Span] = msgspec.field(default_factory=list)
    """The request's timeline."""

    @property
    def rtf(self) -> float:
        """Real-time factor: seconds waited per second of audio."""
        return self.jct / self.audio_seconds

    def check(self, request: BenchRequest) -> None:
        """Raise `WrongWork` unless lengths match the table and the audio is not silent."""
        reply = ("reply tokens", len(self.text_ids), request.reply_tokens)
        for what, got, wanted in (reply, ("codes", self.codes, request.codes)):
            if got != wanted:
                raise WrongWork(f"request {request.index}: {got} {what}; the table says {wanted}")
        if not np.isfinite(self.ttfa) or self.audio_seconds <= 0:
            raise WrongWork(f"request {request.index}: no audio, or only silence (rms {self.rms:.2e})")


OmniDriver = LoadDriver[BenchRequest, Outcome]
OmniSlice = LoadSlice[Outcome]


class WrongWork(Exception):
    """An answer does not match the workload, so the sides would not do the same work."""


class FirstAudio:
    """Finds the time when 80 ms of non-silent audio have arrived."""

    def __init__(self, silence: float) -> None:
        """`silence`: root mean square below which samples are ignored."""
        self._silence = silence
        self.at: float | None = None
        self._samples = self._rate = 0
        self._square = 0.0

    def add(self, samples: np.ndarray, sample_rate: int, now: float) -> None:
        """Add samples [n] float32 that arrived at `now`."""
        self._samples += len(samples)
        self._rate = sample_rate
        self._square += float(np.square(samples, dtype=np.float64).sum())
        if self.at is None and self._samples >= FIRST_AUDIO_SECONDS * sample_rate and self.rms > self._silence:
            self.at = now

    @property
    def rms(self) -> float:
        return (self._square / self._samples) ** 0.5 if self._samples else 0.0

    def fields(self, sent: float) -> dict[str, Any]:
        """The fields of an `Outcome` that follow from the audio, for a request sent at `sent`."""
        seconds = self._samples / self._rate if self._rate else 0.0
        return {"ttfa": float("inf") if self.at is None else self.at - sent, "audio_seconds": seconds, "rms": self.rms}
