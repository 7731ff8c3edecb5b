"""A side that answers at once, for tests of what surrounds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from segue.bench.omni.outcome import Outcome
from segue.bench.omni.workload import BenchRequest
from segue.messages.request import Message, TextPart


def request(index: int, tokens: int = 2) -> BenchRequest:
    kinds = ("text", "image", "audio", "video")
    return BenchRequest(index, kinds[index % 4], [Message("user", [TextPart(f"number {index}")])], tokens, 4 * tokens)


def outcome(asked: BenchRequest, jct: float = 1.0, scale: float = 1.0) -> Outcome:
    """The answer that a request asks for."""
    return Outcome(
        index=asked.index,
        kind=asked.kind,
        jct=jct * scale,
        ttft=0.1 * scale,
        ttfa=0.4 * scale,
        audio_seconds=2.0,
        prompt_tokens=5,
        text_ids=list(range(asked.reply_tokens)),
        codes=asked.codes,
        code_ids=list(range(asked.codes)),
        rms=0.1,
        spans=[("queue", "waiting", 0.0, 0.2 * scale), ("thinker", "busy", 0.2 * scale, 1.0 * scale)],
    )


class FakeDriver:
    """Answers a request when all that can run together are there, newest first; keeps a log."""

    startup = 0.5

    def __init__(self, name: str, together: int, log: list[str], answer: Callable[[BenchRequest], Outcome] = outcome):
        self.name = name
        self._together = together
        self._log = log
        self._answer = answer
        self._held: list[asyncio.Event] = []
        self.most = 0
        self.seen: list[int] = []
        self.remaining = 0

    async def start(self) -> None:
        self._log.append(f"{self.name} starts")

    async def take_over(self, together: int) -> None:
        self._log.append(f"{self.name} takes over from {together}")

    async def hand_over(self) -> None:
        self._log.append(f"{self.name} hands over")

    async def stop(self) -> None:
        self._log.append(f"{self.name} stops")

    def expect(self, requests: int) -> None:
        """So many will come."""
        self.remaining = requests

    async def run(self, request: BenchRequest) -> Outcome:
        self.seen.append(request.index)
        mine = asyncio.Event()
        self._held.append(mine)
        self.most = max(self.most, len(self._held))
        # a client too many would show in `most`: nobody is answered before the loop has sent all it may
        if len(self._held) >= min(self._together, self.remaining):
            self._held[-1].set()
        await mine.wait()
        self._held.remove(mine)
        self.remaining -= 1
        if self._held and len(self._held) >= self.remaining:
            self._held[-1].set()  # the tail: nobody else will come
        return self._answer(request)
