"""The other ranks of a denoiser: they hold the samples that the leader has, and do their share of each call."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from segue.engines.autoregressive.contract import LoraHost, TakesLora
from segue.engines.contract import StageRequest
from segue.engines.diffusion.contract import CachesBlocks, DiffusionAdapter, Row, Sample
from segue.engines.diffusion.exchange import NO_MEMORY, STRAY, gathered, told
from segue.engines.diffusion.reserve import Reserve
from segue.kernels.memory import out_of_memory
from segue.messages.errors import SegueError, StageFailed
from segue.parallel.group import ReplicaBroken
from segue.parallel.orders import LoadAdapter, UnloadAdapter, answer, dtype_of, received
from segue.parallel.row_orders import (
    Begin,
    End,
    Fared,
    Feed,
    Gather,
    Go,
    Predict,
    RowOrder,
    Trial,
    WarmUp,
    decode_row_order,
    encode_fared,
)
from segue.parallel.ways import Ways

log = logging.getLogger(__name__)


@torch.inference_mode()
def follow_rows(adapter: DiffusionAdapter, ways: Ways, orders: socket.socket) -> None:
    """Do what is this rank's of each call, until the leader closes its end.

    Raises `ReplicaBroken` where this rank has failed in a call of a network that is divided, and the others have not.
    """
    follower = _Follower(adapter, ways, orders, Reserve(adapter, ways.everyone.device))
    while (data := follower.heard()) is not None:
        follower.obey(decode_row_order(data))


@dataclass(slots=True)
class _Follower:
    adapter: DiffusionAdapter
    ways: Ways
    orders: socket.socket
    reserve: Reserve
    states: dict[str, Any] = field(default_factory=dict)
    samples: dict[tuple[str, int], Sample] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    """By request: why this rank has none of its samples."""
    trials: Iterator[Sample] | None = None
    named: Predict | None = None
    """The last call."""
    latents: torch.Tensor | None = None
    """Where the leader's latents of it are to come."""
    made: Sequence[torch.Tensor] = ()
    """What this rank predicted in it."""
    failed: bool = False
    """In it."""

    @property
    def rank(self) -> int:
        return self.ways.everyone.rank

    def heard(self) -> bytes | None:
        """The next order. A leader that failed in this rank's part of a call as well sends one soon; one that did not
        waits for this rank. To ranks of other parts it listens."""
        alone = self.failed and self.ways.network is not None and self.ways.branch_part == 0
        self.orders.settimeout(STRAY if alone else None)
        try:
            return received(self.orders)
        except TimeoutError as error:
            raise ReplicaBroken("the other ranks are in a call that failed here alone") from error

    def obey(self, order: RowOrder) -> None:
        match order:
            case Begin():
                request = msgspec.msgpack.decode(order.request, type=StageRequest)
                self.tried(request.request_id, lambda: self.begin(request))
            case Feed():
                if order.request_id not in self.failures:
                    self.tried(order.request_id, lambda: self.feed(order))
            case End():
                self.end(order.request_id)
            case WarmUp():
                self.adapter.warm_up()
            case Trial():
                self.trials = self.trials or self.adapter.trials()
                sample = next(self.trials)
                self.samples[sample.request_id, sample.index] = sample
            case Predict():
                self.named, self.latents, self.made = order, None, ()
                if self.ways.network is None:
                    self.latents = self.room(order)
                    self.predict(order)
                else:
                    self.say(self.ready(order))
            case Go():
                assert self.named is not None, "a call is named before it is made"
                self.predict(self.named)
            case Gather():
                self.gather()
            case LoadAdapter():
                self.host.load(order.name, order.directory)
            case UnloadAdapter():
                self.host.unload(order.name)

    @property
    def host(self) -> LoraHost:
        """The leader has one, so this rank has."""
        assert isinstance(self.adapter, TakesLora)
        assert self.adapter.lora is not None
        return self.adapter.lora

    def tried(self, request_id: str, what: Callable[[], None]) -> None:
        """A failure is that request's: the leader hears of it with the first call that needs its samples. As a rule
        the leader's adapter says the same, and there is none."""
        try:
            what()
        except SegueError as error:
            self.failures[request_id] = error
            log.info("rank %d refuses request %s: %s", self.rank, request_id, error)
        # any kind: adapters read what the client wrote
        except Exception as error:
            self.failures[request_id] = error
            log.exception("rank %d cannot prepare request %s", self.rank, request_id)

    def begin(self, request: StageRequest) -> None:
        self.states[request.request_id] = self.adapter.begin(request)

    def feed(self, order: Feed) -> None:
        state = self.states[order.request_id]
        for sample in self.adapter.feed(state, order.upstream, order.payload, final=order.final):
            self.samples[order.request_id, sample.index] = sample

    def end(self, request_id: str) -> None:
        self.failures.pop(request_id, None)
        if request_id in self.states:
            self.adapter.end(self.states.pop(request_id))
        self.samples = {key: kept for key, kept in self.samples.items() if key[0] != request_id}

    def own(self, order: Predict) -> list[int]:
        """Places of the rows that this rank computes, alone or with others."""
        return [
            place
            for place, (_, _, branch, _) in enumerate(order.rows)
            if self.ways.owner(branch) == self.ways.branch_part
        ]

    def ready(self, order: Predict) -> Fared:
        """Whether this rank can begin its part of a call: it has the memory for the latents from then on, and could
        have that for its rows."""
        self.failed = False
        try:
            self.latents = self.room(order)
            rows = [self.row(*order.rows[place]) for place in self.own(order)]
            return Fared() if self.reserve.had(rows) else NO_MEMORY
        # any kind, the adapter's own included: the leader waits for an answer, and this is one
        except Exception as error:
            self.note(error)
            return told(error)

    def room(self, order: Predict) -> torch.Tensor:
        """For the latents of a call: [rows, …]."""
        return torch.empty(order.shape, dtype=dtype_of(order.dtype), device=self.ways.everyone.device)

    def predict(self, order: Predict) -> None:
        """Raises `ReplicaBroken` where memory is over while others are in the middle of the same rows."""
        failure = None
        assert self.latents is not None, "a call begins when there is memory for it"
        self.ways.everyone.broadcast(self.latents)
        try:
            self.made = self.computed(order, self.latents)
        # any kind: networks raise what they like, and the leader waits for an answer
        except Exception as error:
            failure = error
            self.note(error)
            if self.ways.network is not None and out_of_memory(error):
                raise ReplicaBroken(f"rank {self.rank} ran out of memory in the middle of a call") from error
        self.failed = failure is not None
        self.say(told(failure))

    def computed(self, order: Predict, latents: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = [self.row(*order.rows[place], latents[place : place + 1]) for place in self.own(order)]
        if not rows:
            return ()
        predict = self.adapter.predict
        if order.behind_first:
            assert isinstance(self.adapter, CachesBlocks)
            predict = self.adapter.predict_behind_first
        with self.adapter.during(rows), self.reserve.measured(rows):
            return predict(rows)

    def gather(self) -> None:
        """This rank's predictions go to the leader; those that are not the first of their part only have the same."""
        assert self.named is not None, "what is gathered was computed"
        if self.ways.heads is None:
            return
        assert self.latents is not None, "they are as predictions are"
        gathered([branch for _, _, branch, _ in self.named.rows], self.made, self.ways, self.latents)

    def row(self, request_id: str, index: int, branch: int, step: int, latents: torch.Tensor | None = None) -> Row:
        """Raises what this rank could not make the sample for."""
        if request_id in self.failures:
            raise StageFailed(f"request {request_id} could not be prepared here") from self.failures[request_id]
        sample = self.samples[request_id, index]
        sample.step = step
        if latents is not None:
            sample.latents = latents
        return Row(sample, branch)

    def say(self, fared: Fared) -> None:
        answer(self.orders, encode_fared(fared))

    def note(self, failure: Exception) -> None:
        """The leader is told that there was a failure; what it was is in the log, or was there already."""
        if isinstance(failure, SegueError) and failure.__cause__ is None:
            log.info("rank %d: %s", self.rank, failure)
        else:
            log.error("rank %d cannot compute its rows", self.rank, exc_info=failure)
