"""What a request of `segue bench omni` gives, on whichever side."""

from __future__ import annotations

import msgspec
import numpy as np

from segue.bench.load import LoadDriver, LoadSlice
from segue.bench.workload import BenchRequest

FIRST_AUDIO_SECONDS = 0.08
"""Audio counts as begun when so much of it is there: a header or a click does not."""


class Outcome(msgspec.Struct, kw_only=True):
    """One answered request. Times are seconds since the client sent it."""

    index: int
    kind: str
    jct: float
    """Whole answer at the client, waiting in any queue included (job completion time)."""
    ttft: float
    """First token of the reply."""
    ttfa: float
    """First 80 ms of audio that is not silence."""
    audio_seconds: float
    prompt_tokens: int
    text_ids: list[int]
    codes: int
    """How many the talker made."""
    code_ids: list[int] = []
    """Which."""
    batch: int = 1
    """Requests that were served together with it from beginning to end (static batches)."""
    rms: float
    """Loudness of the whole waveform."""
    spans: list[tuple[str, str, float, float]] = []
    """(stage, what, start, end): who worked on it when."""
    sent: float = 0.0
    """time.monotonic() at the client."""

    @property
    def rtf(self) -> float:
        """Real-time factor: seconds waited per second of audio."""
        return self.jct / self.audio_seconds

    def check(self, request: BenchRequest) -> None:
        """Raise `WrongWork` unless lengths are those of the table and there is sound."""
        facts = (
            ("reply tokens", len(self.text_ids), request.reply_tokens),
            ("codes", self.codes, request.codes),
        )
        for what, got, wanted in facts:
            if got != wanted:
                raise WrongWork(f"request {request.index}: {got} {what}; the table says {wanted}")
        if not np.isfinite(self.ttfa) or self.audio_seconds <= 0:
            raise WrongWork(f"request {request.index}: no audio, or only silence (rms {self.rms:.2e})")


OmniDriver = LoadDriver[BenchRequest, Outcome]
OmniSlice = LoadSlice[Outcome]


class WrongWork(Exception):
    """An answer is not what the workload asks for, so the sides would not do the same work."""


class FirstAudio:
    """Finds the moment when 80 ms of sound have arrived."""

    def __init__(self, silence: float) -> None:
        """`silence`: root mean square below which samples count as nothing."""
        self._silence = silence
        self._pieces: list[np.ndarray] = []
        self.at: float | None = None
        self.samples = 0
        self._square = 0.0

    def add(self, samples: np.ndarray, sample_rate: int, now: float) -> None:
        """[n] float32, arrived at `now`."""
        self.samples += len(samples)
        self._square += float(np.square(samples, dtype=np.float64).sum())
        if self.at is None and self.samples >= FIRST_AUDIO_SECONDS * sample_rate and self.rms > self._silence:
            self.at = now

    @property
    def rms(self) -> float:
        return (self._square / self.samples) ** 0.5 if self.samples else 0.0
