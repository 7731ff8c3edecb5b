"""Sides of a benchmark and their clients: a closed loop, arrivals of a Poisson process, and turns of the sides.

The sides take turns within one run: each round sends the same requests to every side, one side after the other (A B C,
A B C, …), so that a slow minute of the machine affects all of them, and every request yields a pair.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Numbered(Protocol):
    """Requests and answers: their index shows which belong together."""

    @property
    def index(self) -> int: ...


class Timed(Protocol):
    """An outcome."""

    sent: float
    """time.monotonic() at the client."""

    @property
    def jct(self) -> float:
        """Seconds from sending the request to the whole answer."""

    def check(self, request: Any) -> None:
        """Raise unless the answer matches the request: otherwise the sides would do different work."""


RequestT = TypeVar("RequestT", bound=Numbered)
OutcomeT = TypeVar("OutcomeT", bound=Timed)


_Asked = TypeVar("_Asked", contravariant=True)
_Given = TypeVar("_Given", covariant=True)


class LoadDriver(Protocol[_Asked, _Given]):
    """One side: started once, then sent requests, several at a time."""

    name: str

    @property
    def startup(self) -> float:
        """Seconds from the start of its process until it serves."""

    async def start(self) -> None: ...

    async def take_over(self, together: int) -> None:
        """Begin this side's turn, with `together` clients."""

    async def hand_over(self) -> None:
        """End this side's turn: while idle it must not use the cores of the next one."""

    async def run(self, request: _Asked) -> _Given:
        """Send the request and wait for the whole answer. Raises on failure."""
        ...

    async def stop(self) -> None: ...

    def processes(self) -> dict[int, str]:
        """The side's running processes, each with its role."""


@dataclass(frozen=True)
class LoadSlice(Generic[OutcomeT]):
    """One side's part of one round."""

    side: str
    wall: float
    """Seconds from sending the first request to the last answer."""
    outcomes: list[OutcomeT]


class Load(Protocol):
    """Sends requests to a side in some pattern; returns the outcomes in order."""

    async def __call__(
        self, driver: LoadDriver[RequestT, OutcomeT], requests: Sequence[RequestT]
    ) -> list[OutcomeT]: ...


async def ask(driver: LoadDriver[RequestT, OutcomeT], request: RequestT) -> OutcomeT:
    """Send one request and check its outcome."""
    sent = time.monotonic()
    outcome = await driver.run(request)
    outcome.check(request)
    outcome.sent = sent
    return outcome


def closed(concurrency: int) -> Load:
    """Each client sends its next request when its last one is answered."""

    async def load(driver: LoadDriver[RequestT, OutcomeT], requests: Sequence[RequestT]) -> list[OutcomeT]:
        waiting = iter(requests)
        outcomes: dict[int, OutcomeT] = {}

        async def client() -> None:
            for request in waiting:  # shared: a free client takes the next request
                outcomes[request.index] = await ask(driver, request)

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        return [outcomes[request.index] for request in requests]

    return load


def arriving(times: Sequence[float]) -> Load:
    """Request i is sent at `times[i]`, whether or not earlier ones are answered."""

    async def load(driver: LoadDriver[RequestT, OutcomeT], requests: Sequence[RequestT]) -> list[OutcomeT]:
        began = time.monotonic()

        async def client(at: float, request: RequestT) -> OutcomeT:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            return await ask(driver, request)

        async with asyncio.TaskGroup() as clients:
            asked = [clients.create_task(client(at, one)) for at, one in zip(times, requests, strict=True)]
        return [task.result() for task in asked]

    return load


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """`count` arrivals of a Poisson process with `rate` per second: seconds from the start."""
    draw, now, times = random.Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def load_of(clients: int, rate: float, count: int, seed: int) -> Load:
    """A closed loop of so many clients; for 0 clients `count` Poisson arrivals."""
    return closed(clients) if clients else arriving(poisson(rate, count, seed))


@asynccontextmanager
async def serving(drivers: Sequence[LoadDriver[Any, Any]], say: Callable[[str], None]) -> AsyncIterator[None]:
    """A context within which the sides serve; they are stopped also when this program is terminated."""
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    async with AsyncExitStack() as stack:
        for driver in drivers:
            say(f"starting {driver.name}")
            stack.push_async_callback(driver.stop)
            await driver.start()
        yield


@asynccontextmanager
async def turn(driver: LoadDriver[Any, Any], together: int) -> AsyncIterator[None]:
    """A context within which only this side works."""
    await driver.take_over(together)
    try:
        yield
    finally:
        await driver.hand_over()


async def warm_up(
    drivers: Sequence[LoadDriver[RequestT, OutcomeT]], requests: Sequence[RequestT], load: Load, together: int
) -> None:
    """Send requests that do not count to every side, in turn."""
    for driver in drivers:
        async with turn(driver, together):
            await load(driver, requests)


Turn = Callable[[LoadDriver[Any, Any], int], AbstractAsyncContextManager[None]]


async def in_turn(
    drivers: Sequence[LoadDriver[RequestT, OutcomeT]],
    rounds: Sequence[Sequence[RequestT]],
    load: Load,
    together: int,
    say: Callable[[str], None],
    speed: Callable[[LoadSlice[OutcomeT]], str],
    its_turn: Turn = turn,
) -> list[LoadSlice[OutcomeT]]:
    """Run every round on every driver, in turn. `speed`: formats a slice's progress line; `its_turn`: a context around
    each turn, outside its measured time.

    Raises an `ExceptionGroup` of failed requests; running requests are cancelled.
    """
    slices = []
    for number, requests in enumerate(rounds):
        for driver in drivers:
            async with its_turn(driver, together):
                began = time.monotonic()
                outcomes = await load(driver, requests)
                taken = LoadSlice(driver.name, time.monotonic() - began, outcomes)
            say(f"  round {number + 1}/{len(rounds)}, {driver.name}: {speed(taken)}")
            slices.append(taken)
    return slices


def by_side(slices: Sequence[LoadSlice[OutcomeT]]) -> dict[str, list[LoadSlice[OutcomeT]]]:
    """The slices of each side, in the order of a round."""
    names = dict.fromkeys(taken.side for taken in slices)
    return {name: [taken for taken in slices if taken.side == name] for name in names}


def outcomes_of(slices: Sequence[LoadSlice[OutcomeT]]) -> list[OutcomeT]:
    return [outcome for taken in slices for outcome in taken.outcomes]
