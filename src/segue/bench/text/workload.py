"""The requests of `segue bench text`: prompts of random tokens of one length, answers of a fixed length.

Prompts are token ids, so that no side's time includes a tokenizer and every side reads the same; request `i` of a seed
is always the same. One more load is specific to this benchmark: a long prompt that arrives while others are answered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from segue.bench.harness.load import LoadDriver, LoadSlice, ask, turn
from segue.bench.harness.scenarios import LoadOutcome

FIRST_ID = 300
"""Lower ids are not used: small vocabularies have their special tokens there."""
LAST_IDS = 64
"""Number of ids at the end that are not used either."""


class TextRequest(msgspec.Struct, frozen=True):
    """A request for one completion."""

    index: int
    prompt: list[int]
    tokens: int
    """Exact number of output tokens."""


class TextOutcome(LoadOutcome, kw_only=True):
    """One answered request."""

    times: list[float]
    """Time of each token at the client; several may arrive together."""
    token_ids: list[int] = msgspec.field(default_factory=list)

    def count(self) -> int:
        """Number of output tokens."""
        return len(self.times)

    def check(self, request: TextRequest) -> None:
        """Raise `WrongLength` unless the number of tokens is the requested one."""
        if len(self.times) != request.tokens:
            came = f"{len(self.times)} tokens came, {request.tokens} were asked for"
            raise WrongLength(f"request {request.index}: {came}")

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 if there is only one."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a scenario's requests."""

    prompt: int
    output: int
    shared: float = 0.0
    """Share of the prompt that is a prefix of all requests."""

    def __str__(self) -> str:
        return f"{self.prompt}/{self.output}"


def requests(shape: Shape, start: int, count: int, vocab: int, seed: int, *, equal: bool = False) -> list[TextRequest]:
    """Requests `start` to `start + count`; `equal`: all with the prompt of the first."""
    common = round(shape.shared * shape.prompt)
    prefix = _ids(f"{seed}/prefix/{shape}/{start if equal else 0}", common, vocab)
    return [
        TextRequest(
            index,
            prefix + _ids(f"{seed}/{shape}/{start if equal else index}", shape.prompt - common, vocab),
            shape.output,
        )
        for index in range(start, start + count)
    ]


def _ids(seed: str, count: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(min(FIRST_ID, vocab // 2), max(vocab - LAST_IDS, vocab // 2 + 1)), k=count)


class WrongLength(Exception):
    """An answer does not match its request."""


TextDriver = LoadDriver[TextRequest, TextOutcome]
TextSlice = LoadSlice[TextOutcome]


async def intrude(driver: TextDriver, decoding: Sequence[TextRequest], long: TextRequest) -> list[float]:
    """The times between tokens of `decoding` during the prefill of `long`: from sending it (when all have begun) until
    its first token. `decoding` must be long enough to last."""
    async with turn(driver, len(decoding) + 1):
        running = [asyncio.create_task(ask(driver, request)) for request in decoding]
        try:
            # a short request first shows that the others run: it is admitted after them
            await ask(driver, TextRequest(long.index + 1, long.prompt[:8], 4))
            began = time.monotonic()
            await ask(driver, TextRequest(long.index, long.prompt, 1))
            ended = time.monotonic()
            outcomes = await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
    gaps = []
    for outcome in outcomes:
        times = [outcome.sent + at for at in outcome.times]
        gaps += [b - a for a, b in pairwise(times) if b > began and a < ended]
    return gaps
