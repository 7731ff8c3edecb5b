"""Segue's side of `segue bench omni`."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from pathlib import Path
from typing import Any

from segue.bench.harness.async_omni import AsyncOmniDriver
from segue.bench.omni.families import Suppressed
from segue.bench.omni.outcome import FirstAudio, Outcome
from segue.bench.omni.workload import BenchRequest
from segue.messages.deltas import AudioDelta, Finished, TextDelta
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams


class SegueDriver(AsyncOmniDriver):
    """Sends requests to a running Segue."""

    def __init__(
        self,
        model_dir: Path,
        suppressed: Suppressed,
        *,
        silence: float,
        unspoken_codes: int = 0,
        name: str = "segue",
        **settings: Any,
    ) -> None:
        """`unspoken_codes`: `segue.bench.omni.families.OmniFamily`. `settings`: further arguments of `AsyncOmni`."""
        super().__init__(name, model_dir, **settings)
        self._suppressed = suppressed
        self._silence = silence
        self._unspoken = unspoken_codes

    def threads(self) -> dict[str, int]:
        """CPU threads of each worker."""
        stages = self._omni.plan.stages
        return {"+".join(group): max(stages[name].threads for name in group) for group in self._omni.plan.groups}

    async def run(self, request: BenchRequest) -> Outcome:
        sent = time.monotonic()
        first_token: float | None = None
        first_audio = FirstAudio(self._silence)
        asked = Request(
            request_id=uuid.uuid4().hex,
            messages=request.messages,
            modalities=["text", "audio"],
            sampling={
                "thinker": _exactly(request.reply_tokens, self._suppressed.thinker),
                "talker": _exactly(request.codes + self._unspoken, self._suppressed.talker),
            },
        )
        async with aclosing(self._omni.stream(asked)) as deltas:
            async for delta in deltas:
                now = time.monotonic()
                match delta:
                    case TextDelta():
                        first_token = first_token or now
                    case AudioDelta():
                        first_audio.add(delta.array, delta.sample_rate, now)
                    case Finished():
                        codes = delta.token_ids.get("talker", [])
                        codes = codes[: max(0, len(codes) - self._unspoken)]
                        return Outcome(
                            index=request.index,
                            kind=request.kind,
                            jct=now - sent,
                            ttft=float("inf") if first_token is None else first_token - sent,
                            prompt_tokens=delta.usage.prompt_tokens,
                            text_ids=delta.token_ids.get("thinker", []),
                            codes=len(codes),
                            code_ids=codes,
                            spans=delta.metrics.spans,
                            **first_audio.fields(sent),
                        )
        raise AssertionError("a stream ends with Finished or an error")


def _exactly(tokens: int, suppressed: tuple[int, ...]) -> SamplingParams:
    """Greedy sampling of a fixed length; everything else is the family's default."""
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, suppress_tokens=list(suppressed)
    )
