"""The baselines: `transformers` in its own process, one request at a time or in static batches.

Requests are sent to it over a socket pair as soon as a client sends them, and wait there; JCT is measured at the client
and so includes that queue. The audio is complete when `generate` returns, so its time to first audio is its JCT. A
streamer, which `generate` passes on to the thinker, records the first token of the reply; its time counts from the
client's request, although no client receives it before the end.

This module also defines the messages in addition to those of `segue.bench.harness.channel`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from segue.bench.harness.child import ChildDriver, ChildProcess, same_environment
from segue.bench.omni.outcome import FirstAudio, Outcome
from segue.bench.omni.workload import BenchRequest


class Options(msgspec.Struct, kw_only=True):
    """Options for loading the baseline; its process receives them as JSON in `argv`."""

    model_dir: str
    device: str
    dtype: str
    load_format: str
    threads: int
    suppressed_thinker: list[int]
    suppressed_talker: list[int]
    talker_ends: list[int]


class Policy(msgspec.Struct, tag=True):
    """Sets the way of serving from now on."""

    max_batch: int
    gather: float
    """Seconds to wait for a batch to fill after its first request. Clients answered by one batch send their next
    requests within milliseconds of each other: without waiting, each batch would start with the first request alone."""


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""

    threads: int


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer. Times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    batch: int
    """Number of requests served together with it, itself included."""
    began: float
    """Taken from the queue,"""
    prepared: float
    """processor finished,"""
    first_token: float
    """first token of the reply generated,"""
    thinker_done: float
    talker_done: float
    done: float
    """waveform complete."""
    prompt_tokens: int
    text_ids: list[int]
    code_ids: list[int]
    samples: bytes
    """float32 little-endian mono."""
    sample_rate: int
    gpu_bytes: int = 0
    """Peak GPU memory of the process so far."""


GATHER_SECONDS = 0.05
STATIC_BATCH = 8
NAMES = {"one": "transformers one at a time", "static": "transformers static batches"}


class BaselineProcess(ChildProcess[BenchRequest, Loaded, Answer]):
    """A process of `segue.bench.omni.baseline_process`."""

    def __init__(self, options: Options) -> None:
        super().__init__(
            "the baseline",
            "segue.bench.omni.baseline_process",
            options,
            Loaded,
            Answer,
            same_environment(options.threads),
        )
        self.gpu_bytes = 0
        """Peak GPU memory so far."""

    async def ask(self, request: BenchRequest) -> Answer:
        """Send a request and wait for its answer."""
        answer = await super().ask(request)
        self.gpu_bytes = answer.gpu_bytes
        return answer


class BaselineDriver(ChildDriver[BaselineProcess]):
    """One way of serving with the baseline's process."""

    def __init__(self, way: str, process: BaselineProcess, silence: float, gather: float = GATHER_SECONDS) -> None:
        """`way`: a key of `NAMES`. `gather`: seconds that a batch which is not full waits for others."""
        super().__init__(NAMES[way], process)
        self._way = way
        self._gather = gather
        self._silence = silence

    async def take_over(self, together: int) -> None:
        """Set the process's way of serving; a batch is as large as the number of clients, up to a limit."""
        most = 1 if self._way == "one" else min(STATIC_BATCH, together)
        await self.process.send(Policy(most, self._gather if most > 1 else 0.0))

    async def run(self, request: BenchRequest) -> Outcome:
        sent = time.monotonic()
        answer = await self.process.ask(request)
        came = time.monotonic()
        samples = np.frombuffer(answer.samples, dtype="<f4")
        first = FirstAudio(self._silence)
        first.add(samples, answer.sample_rate, came)
        return Outcome(
            index=request.index,
            kind=request.kind,
            jct=came - sent,
            ttft=answer.first_token - sent,
            ttfa=float("inf") if first.at is None else first.at - sent,
            audio_seconds=len(samples) / answer.sample_rate,
            prompt_tokens=answer.prompt_tokens,
            text_ids=answer.text_ids,
            codes=len(answer.code_ids),
            code_ids=answer.code_ids,
            batch=answer.batch,
            rms=first.rms,
            spans=_spans(answer, sent),
        )


def _spans(answer: Answer, sent: float) -> list[tuple[str, str, float, float]]:
    marks: Sequence[tuple[str, float]] = (
        ("queue", answer.began),
        ("input", answer.prepared),
        ("thinker", answer.thinker_done),
        ("talker", answer.talker_done),
        ("vocoder", answer.done),
    )
    spans, start = [], sent
    for stage, end in marks:
        spans.append((stage, "waiting" if stage == "queue" else "busy", start - sent, end - sent))
        start = end
    return spans
