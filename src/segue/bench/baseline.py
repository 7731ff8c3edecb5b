"""The baselines: `transformers` in a process of its own, one request at a time or in static batches.

Requests go to it over a socket pair the moment a client sends them, and wait there; JCT is taken at the client and so
includes that queue. The audio is there when `generate` returns, so its time to first audio is its JCT; the first token
of the reply is noted by a streamer that `generate` hands on to the thinker, and counted from when the client sent the
request, though it reaches nobody before the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from segue.bench.baseline_wire import Answer, Loaded, Options, Policy
from segue.bench.child import ChildDriver, ChildProcess
from segue.bench.outcome import FirstAudio, Outcome
from segue.bench.workload import BenchRequest

GATHER_SECONDS = 0.05
STATIC_BATCH = 8
NAMES = {"one": "transformers one at a time", "static": "transformers static batches"}


class BaselineProcess(ChildProcess[BenchRequest, Loaded, Answer]):
    """`segue.bench.baseline_process`."""

    def __init__(self, options: Options) -> None:
        super().__init__("the baseline", "segue.bench.baseline_process", options, Loaded, Answer, {})
        self.gpu_bytes = 0
        """Most GPU memory it has held so far."""

    async def ask(self, request: BenchRequest) -> Answer:
        """Send a request and wait for its answer."""
        answer = await super().ask(request)
        self.gpu_bytes = answer.gpu_bytes
        return answer


class BaselineDriver(ChildDriver[BaselineProcess]):
    """One way of serving with the baseline's process."""

    def __init__(self, way: str, process: BaselineProcess, silence: float, gather: float = GATHER_SECONDS) -> None:
        """`way`: of `NAMES`. `gather`: seconds that a batch which is not full waits for others."""
        super().__init__(NAMES[way], process)
        self._way = way
        self._gather = gather
        self._silence = silence

    async def take_over(self, together: int) -> None:
        """From now on the process serves like this; a batch is as large as there are clients, up to a bound."""
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
