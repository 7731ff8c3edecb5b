"""Every rank of a replica runs the same engine; rank 0 repeats to the others what it receives (`segue.parallel.ranks`).

Rank 0 alone has an inbox, connectors and an outbox; `Leading` is its engine as the worker sees it. What arrives goes to
all ranks in the same order, payloads included. The others `follow`: their engines' outputs go nowhere.

Optional reading: a replica of one rank has its engine as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from segue.engines.autoregressive.contract import LoraHost
from segue.engines.contract import Engine, Holds, Payload, StageOutput, StageRequest
from segue.kernels.device import end_where_lost
from segue.kernels.linear.lora import Lora
from segue.messages.errors import SegueError
from segue.parallel.ranks import Ranks
from segue.parallel.wire import decode, encode

log = logging.getLogger(__name__)

COMPARED_EVERY = 64
"""Steps from one comparison of the ranks' states to the next."""


class Add(msgspec.Struct, tag=True, array_like=True):
    """`Engine.add`."""

    request: StageRequest


class Feed(msgspec.Struct, tag=True, array_like=True):
    """`Engine.feed`."""

    request_id: str
    upstream: str
    payload: dict[str, Any]
    final: bool


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """`Engine.cancel`."""

    request_id: str


class Pause(msgspec.Struct, tag=True, array_like=True):
    """`Engine.pause`."""

    request_id: str


class Resume(msgspec.Struct, tag=True, array_like=True):
    """`Engine.resume`."""

    request_id: str


class GoOn(msgspec.Struct, tag=True, array_like=True):
    """`Holds.go_on`."""

    request_id: str


class Close(msgspec.Struct, tag=True, array_like=True):
    """`Holds.close`."""

    request_id: str


class Step(msgspec.Struct, tag=True, array_like=True):
    """`Engine.step`; the values that rank 0 decides on in it follow."""


class Compare(msgspec.Struct, tag=True, array_like=True):
    """Compare the state with rank 0's, which follow."""


class LoadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Load a LoRA adapter that rank 0 has loaded."""

    name: str
    directory: str


class UnloadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Unload an adapter: no further request will name it."""

    name: str


Event = Add | Feed | Cancel | Pause | Resume | GoOn | Close | Step | Compare | LoadAdapter | UnloadAdapter


@runtime_checkable
class RankedEngine(Engine, Protocol):
    """An engine that several ranks can run."""

    def shared_state(self) -> Mapping[str, Any]:
        """What must be equal on all ranks between two steps: plain values by name."""


class Leading:
    """Rank 0's engine: repeats every call that changes it to the other ranks."""

    def __init__(self, inner: RankedEngine, ranks: Ranks, compared_every: int = COMPARED_EVERY) -> None:
        self.inner = inner
        self._ranks = ranks
        self._compared_every = compared_every
        self._steps = 0

    def warm_up(self) -> None:
        """The other ranks do the same by themselves when they start."""
        self.inner.warm_up()

    def add(self, request: StageRequest) -> None:
        self.inner.add(request)  # the others only receive requests that were accepted
        self._tell(Add(request))

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        self._tell(Feed(request_id, upstream, dict(payload), final))
        self.inner.feed(request_id, upstream, payload, final=final)

    def cancel(self, request_id: str) -> None:
        self._tell(Cancel(request_id))
        self.inner.cancel(request_id)

    def pause(self, request_id: str) -> None:
        self._tell(Pause(request_id))
        self.inner.pause(request_id)

    def resume(self, request_id: str) -> None:
        self._tell(Resume(request_id))
        self.inner.resume(request_id)

    def go_on(self, request_id: str) -> None:
        assert isinstance(self.inner, Holds)
        self._tell(GoOn(request_id))
        self.inner.go_on(request_id)

    def close(self, request_id: str) -> None:
        assert isinstance(self.inner, Holds)
        self._tell(Close(request_id))
        self.inner.close(request_id)

    def backlog(self, request_id: str) -> int:
        return self.inner.backlog(request_id)

    def has_work(self) -> bool:
        return self.inner.has_work()

    def step(self) -> Sequence[StageOutput]:
        self._tell(Step())
        outputs = self.inner.step()
        self._steps += 1
        if self._steps % self._compared_every == 0:
            self._tell(Compare())
            self._ranks.compare(self.inner.shared_state())
        return outputs

    def stats(self) -> dict[str, float]:
        return self.inner.stats()

    def _tell(self, event: Event) -> None:
        self._ranks.tell(encode(event))


class LedAdapters:
    """Rank 0's LoRA adapters: the other ranks load and unload the same ones. Implements `LoraHost`."""

    def __init__(self, inner: LoraHost, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks

    @property
    def loaded(self) -> Mapping[str, Lora]:
        return self._inner.loaded

    def load(self, name: str, directory: str) -> None:
        """Load it on rank 0, which refuses invalid adapters before any other rank receives them."""
        self._inner.load(name, directory)
        self._ranks.tell(encode(LoadAdapter(name, directory)))

    def unload(self, name: str) -> None:
        self._inner.unload(name)
        self._ranks.tell(encode(UnloadAdapter(name)))


def follow(engine: RankedEngine, ranks: Ranks, lora: LoraHost | None = None) -> None:
    """Run a further rank's engine until rank 0 closes its end. `lora`: this rank's adapters. Raises `ReplicaBroken` if
    this rank cannot do what rank 0 did."""
    while (data := ranks.receive()) is not None:
        try:
            _apply(decode(data, Event), engine, ranks, lora)
        except Exception as error:
            end_where_lost(error)
            raise ranks.out_of_step(error) from error


def _apply(event: Event, engine: RankedEngine, ranks: Ranks, lora: LoraHost | None) -> None:
    match event:
        case Add(request):
            engine.add(request)
        case Feed(request_id, upstream, payload, final):
            try:
                engine.feed(request_id, upstream, payload, final=final)
            except Exception as error:
                # stage models parse the client's input: rank 0's fails alike, and cancels the request
                end_where_lost(error)
                refused = isinstance(error, SegueError)
                level, cause = (logging.INFO, None) if refused else (logging.ERROR, error)
                log.log(level, "feed: %s: %s", type(error).__name__, error, exc_info=cause)
        case Cancel(request_id):
            engine.cancel(request_id)
        case Pause(request_id):
            engine.pause(request_id)
        case Resume(request_id):
            engine.resume(request_id)
        case GoOn(request_id):
            assert isinstance(engine, Holds)
            engine.go_on(request_id)
        case Close(request_id):
            assert isinstance(engine, Holds)
            engine.close(request_id)
        case Step():
            engine.step()
        case Compare():
            ranks.compare(engine.shared_state())
        case LoadAdapter(name, directory):
            assert lora is not None, "rank 0 has adapters, but this rank supports none"
            lora.load(name, directory)
        case UnloadAdapter(name):
            assert lora is not None, "rank 0 has adapters, but this rank supports none"
            lora.unload(name)
