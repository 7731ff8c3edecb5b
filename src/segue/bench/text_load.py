"""A load of `segue bench text` alone: a long prompt that comes while others are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

from segue.bench.load import LoadDriver, LoadSlice, ask, turn
from segue.bench.text_workload import TextOutcome, TextRequest

TextDriver = LoadDriver[TextRequest, TextOutcome]
TextSlice = LoadSlice[TextOutcome]


def told(taken: TextSlice) -> str:
    """Output tokens per second."""
    tokens = sum(len(outcome.times) for outcome in taken.outcomes)
    return f"{tokens / taken.wall:.1f} tokens/s"


async def intrude(driver: TextDriver, decoding: Sequence[TextRequest], long: TextRequest) -> list[float]:
    """The times between tokens of `decoding` while the prompt of `long` is read: from when it is sent (all of them have
    come once by then) until its first token. `decoding` must be long enough to last."""
    async with turn(driver, len(decoding) + 1):
        running = [asyncio.create_task(ask(driver, request)) for request in decoding]
        try:
            # a short request in front says when the others run: it is admitted behind them
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
