"""What `segue bench text` asks: prompts of random tokens, all of one length, answers of a given length.

Prompts are token ids, so that no tokenizer is in anybody's time and every side reads the same; request `i` of a seed is
always the same one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import msgspec

FIRST_ID = 300
"""Ids below are left alone: small vocabularies keep their special tokens there."""
LAST_IDS = 64
"""So are the last ones."""


class TextRequest(msgspec.Struct, frozen=True):
    """One completion."""

    index: int
    prompt: list[int]
    tokens: int
    """Exactly so many are made."""


class TextOutcome(msgspec.Struct, kw_only=True):
    """One answered request. Times are seconds since the client sent it."""

    index: int
    prompt_tokens: int
    times: list[float]
    """When each token was at the client; several may come together."""
    jct: float
    """Whole answer at the client."""
    token_ids: list[int] = []
    sent: float = 0.0
    """time.monotonic() at the client."""

    def check(self, request: TextRequest) -> None:
        """Raise `WrongLength` unless as many tokens came as were asked for."""
        if len(self.times) != request.tokens:
            raise WrongLength(
                f"request {request.index}: {len(self.times)} tokens came, {request.tokens} were asked for"
            )

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 where there is only one."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of the requests of a scenario."""

    prompt: int
    output: int
    shared: float = 0.0
    """Share of the prompt that all requests begin with."""

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


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """`count` arrivals of a Poisson process with `rate` per second: seconds from the beginning."""
    draw, now, times = random.Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


class WrongLength(Exception):
    """An answer is not what the workload asks for."""
