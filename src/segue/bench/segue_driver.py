"""Segue's side of a benchmark: `AsyncOmni`, with the clients in the process of its orchestrator."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from segue.bench.driver import FirstAudio, Outcome
from segue.bench.workload import BenchRequest, Suppressed
from segue.messages.deltas import AudioDelta, Finished, TextDelta
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.messages.stats import WorkerStats
from segue.orchestrator.omni import AsyncOmni


class SegueDriver:
    """Drives a running graph of stages."""

    name = "segue"

    def __init__(
        self,
        model_dir: Path,
        suppressed: Suppressed,
        *,
        silence: float,
        dtype: str,
        load_format: str,
        config: dict[str, Any] | Path | None = None,
    ) -> None:
        self._omni = AsyncOmni(model_dir, dtype=dtype, load_format=load_format, config=config)
        self._suppressed = suppressed
        self._silence = silence

    async def start(self) -> None:
        await self._omni.start()

    async def take_over(self) -> None:
        """Nothing to do: batching is the engines' own."""

    async def stop(self) -> None:
        await self._omni.stop()

    def threads(self) -> dict[str, int]:
        """CPU threads of each worker."""
        stages = self._omni.plan.stages
        return {"+".join(group): max(stages[name].threads for name in group) for group in self._omni.plan.groups}

    def processes(self) -> dict[int, str]:
        """Every process of this side by what it does; the clients live in the orchestrator's."""
        names = {os.getpid(): "orchestrator and clients"}
        for stage, health in self._omni.health().stages.items():
            for number, replica in enumerate(health.replicas):
                if replica.pid is not None:
                    known = names.get(replica.pid)
                    label = stage if number == 0 else f"{stage}.{number}"
                    names[replica.pid] = label if known is None else f"{known}+{label}"
        return names

    def pids(self) -> list[int]:
        return list(self.processes())

    def stats(self) -> list[WorkerStats]:
        """What every stage last reported of itself."""
        return [stage for stats in self._omni.orchestrator.stats.values() for stage in stats.stages]

    async def run(self, request: BenchRequest) -> Outcome:
        sent = time.monotonic()
        first_token: float | None = None
        first_audio = FirstAudio(self._silence)
        rate = 0
        async with _closing(self._omni.stream(self._request(request))) as deltas:
            async for delta in deltas:
                now = time.monotonic()
                match delta:
                    case TextDelta():
                        first_token = first_token or now
                    case AudioDelta():
                        rate = delta.sample_rate
                        first_audio.add(delta.array, rate, now)
                    case Finished():
                        return _outcome(request, delta, sent, now, first_token, first_audio, rate)
        raise AssertionError("a stream ends with Finished or an error")

    def _request(self, request: BenchRequest) -> Request:
        return Request(
            request_id=uuid.uuid4().hex,
            messages=request.messages,
            modalities=["text", "audio"],
            sampling={
                "thinker": _exactly(request.reply_tokens, self._suppressed.thinker),
                "talker": _exactly(request.codes, self._suppressed.talker),
            },
        )


def _exactly(tokens: int, suppressed: tuple[int, ...]) -> SamplingParams:
    """Greedy, of a given length; everything else is the family's own default."""
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, suppress_tokens=list(suppressed)
    )


@asynccontextmanager
async def _closing(stream: Any) -> AsyncIterator[Any]:
    try:
        yield stream
    finally:
        await stream.aclose()


def _outcome(
    request: BenchRequest,
    finished: Finished,
    sent: float,
    now: float,
    first_token: float | None,
    first_audio: FirstAudio,
    rate: int,
) -> Outcome:
    codes = finished.token_ids.get("talker", [])
    return Outcome(
        index=request.index,
        kind=request.kind,
        jct=now - sent,
        ttft=float("inf") if first_token is None else first_token - sent,
        ttfa=float("inf") if first_audio.at is None else first_audio.at - sent,
        audio_seconds=first_audio.samples / rate if rate else 0.0,
        prompt_tokens=finished.usage.prompt_tokens,
        text_ids=finished.token_ids.get("thinker", []),
        codes=len(codes),
        code_ids=codes,
        rms=first_audio.rms,
        spans=finished.metrics.spans,
    )
