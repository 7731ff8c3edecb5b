"""Clients of `segue bench text`: a closed loop, arrivals at given times, and the sides in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from segue.bench.text_workload import TextOutcome, TextRequest, check


class TextDriver(Protocol):
    """One side: started once, then given requests, several at a time."""

    name: str

    @property
    def startup(self) -> float:
        """Seconds from the start of its process until it serves."""

    async def start(self) -> None: ...

    async def take_over(self, together: int) -> None:
        """This side's turn begins, with so many clients."""

    async def hand_over(self) -> None:
        """It ends: whatever this side does while nobody asks, it must not take the cores of the next one."""

    async def run(self, request: TextRequest) -> TextOutcome:
        """Send the request and wait for all of its answer. Raises what went wrong."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class TextSlice:
    """One side's part of one round."""

    side: str
    wall: float
    """Seconds from the first request sent to the last answer."""
    outcomes: list[TextOutcome]


Load = Callable[[TextDriver, Sequence[TextRequest]], Awaitable[list[TextOutcome]]]


async def ask(driver: TextDriver, request: TextRequest) -> TextOutcome:
    """One request, checked."""
    sent = time.monotonic()
    outcome = await driver.run(request)
    check(request, outcome)
    outcome.sent = sent
    return outcome


def closed(concurrency: int) -> Load:
    """Each client sends its next request when its last one has come back."""

    async def load(driver: TextDriver, requests: Sequence[TextRequest]) -> list[TextOutcome]:
        waiting = iter(requests)
        outcomes: dict[int, TextOutcome] = {}

        async def client() -> None:
            for request in waiting:  # shared: whoever is free takes the next
                outcomes[request.index] = await ask(driver, request)

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        return [outcomes[request.index] for request in requests]

    return load


def arriving(times: Sequence[float]) -> Load:
    """Request i is sent at `times[i]`, whatever has become of those before it."""

    async def load(driver: TextDriver, requests: Sequence[TextRequest]) -> list[TextOutcome]:
        began = time.monotonic()

        async def client(at: float, request: TextRequest) -> TextOutcome:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            return await ask(driver, request)

        async with asyncio.TaskGroup() as clients:
            asked = [clients.create_task(client(at, one)) for at, one in zip(times, requests, strict=True)]
        return [task.result() for task in asked]

    return load


@asynccontextmanager
async def turn(driver: TextDriver, together: int) -> AsyncIterator[None]:
    """The time in which only this side works."""
    await driver.take_over(together)
    try:
        yield
    finally:
        await driver.hand_over()


async def in_turn(
    drivers: Sequence[TextDriver],
    rounds: Sequence[Sequence[TextRequest]],
    load: Load,
    together: int,
    say: Callable[[str], None],
) -> list[TextSlice]:
    """Every round on every driver, in turn: a slow minute of the machine falls on all of them."""
    slices = []
    for number, requests in enumerate(rounds):
        for driver in drivers:
            async with turn(driver, together):
                began = time.monotonic()
                outcomes = await load(driver, requests)
                taken = TextSlice(driver.name, time.monotonic() - began, outcomes)
            tokens = sum(len(outcome.times) for outcome in outcomes)
            say(f"  round {number + 1}/{len(rounds)}, {driver.name}: {tokens / taken.wall:.1f} tokens/s")
            slices.append(taken)
    return slices


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
