"""The closed loop: `concurrency` clients, each of which sends its next request when its last one has come back.

The sides take turns within one run: each round gives the same slice of the workload to every side, one after the other
(A B C, A B C, …), so that a slow minute of the machine falls on all of them, and every request is a pair. While one
side works, the others wait on their sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from segue.bench.driver import Driver, Outcome, check_outcome
from segue.bench.workload import BenchRequest


@dataclass(frozen=True)
class Slice:
    """One side's part of one round."""

    side: str
    round: int
    wall: float
    """Seconds from the first request sent to the last answer."""
    outcomes: list[Outcome]
    """In the order of the workload."""


async def closed_loop(driver: Driver, requests: Sequence[BenchRequest], concurrency: int) -> list[Outcome]:
    """Answers in the order of `requests`.

    Raises an `ExceptionGroup` of what went wrong, `WrongWork` among it; requests under way are cancelled.
    """
    waiting: Iterator[tuple[int, BenchRequest]] = iter(list(enumerate(requests)))
    answers: dict[int, Outcome] = {}

    async def client() -> None:
        for place, request in waiting:  # shared: whoever is free takes the next
            sent = time.monotonic()
            outcome = await driver.run(request)
            check_outcome(request, outcome)
            outcome.sent = sent
            answers[place] = outcome

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(requests))):
            clients.create_task(client())
    return [answers[place] for place in range(len(requests))]


async def interleaved(
    drivers: Sequence[Driver],
    rounds: Sequence[Sequence[BenchRequest]],
    concurrency: int,
    *,
    before: Callable[[Driver], Awaitable[None]],
    after: Callable[[Driver, Slice], Awaitable[None]],
) -> list[Slice]:
    """Every round on every driver, in turn. `before` and `after` enclose each slice, outside its time."""
    slices = []
    for number, requests in enumerate(rounds):
        for driver in drivers:
            await before(driver)
            began = time.monotonic()
            outcomes = await closed_loop(driver, requests, concurrency)
            taken = Slice(driver.name, number, time.monotonic() - began, outcomes)
            await after(driver, taken)
            slices.append(taken)
    return slices
