"""Follower ranks of a denoiser: they hold the same samples as the leader, and compute their share of each call."""

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
from segue.engines.diffusion.contract import CachesBlocks, DiffusionModel, Row, Sample
from segue.engines.diffusion.memory import Reserve
from segue.engines.diffusion.ranks import NO_MEMORY, STRAY, gathered, status_of
from segue.kernels.device import out_of_memory
from segue.messages.errors import SegueError, StageFailed
from segue.parallel.group import ReplicaBroken
from segue.parallel.orders import LoadAdapter, UnloadAdapter, answer, received
from segue.parallel.row_orders import (
    Begin,
    CallStatus,
    End,
    Feed,
    Gather,
    Go,
    Predict,
    RowOrder,
    Trial,
    WarmUp,
    decode_row_order,
    encode_status,
)
from segue.parallel.ways import Ways
from segue.parallel.wire import dtype_of

log = logging.getLogger(__name__)


@torch.inference_mode()
def follow_rows(model: DiffusionModel, ways: Ways, orders: socket.socket) -> None:
    """Compute this rank's share of each call until the leader closes its end.

    Raises `ReplicaBroken` if this rank alone has failed in a call of a divided network.
    """
    follower = _Follower(model, ways, orders, Reserve(model, ways.everyone.device))
    while (data := follower.next_order()) is not None:
        follower.obey(decode_row_order(data))


@dataclass(slots=True)
class _Follower:
    model: DiffusionModel
    ways: Ways
    orders: socket.socket
    reserve: Reserve
    states: dict[str, Any] = field(default_factory=dict)
    samples: dict[tuple[str, int], Sample] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    """By request: why this rank could not prepare its samples."""
    trials: Iterator[Sample] | None = None
    named: Predict | None = None
    """The order of the last call."""
    latents: torch.Tensor | None = None
    """Buffer for the leader's latents of that call."""
    made: Sequence[torch.Tensor] = ()
    """This rank's predictions in that call."""
    failed: bool = False
    """Whether that call failed on this rank."""

    @property
    def rank(self) -> int:
        return self.ways.everyone.rank

    def next_order(self) -> bytes | None:
        """Receive the next order. After a failure in this rank's part of a call, a leader that failed too sends one
        soon, and one that did not waits for this rank. A leader of another part is always awaited."""
        alone = self.failed and self.ways.network is not None and self.ways.branch_part == 0
        self.orders.settimeout(STRAY if alone else None)
        try:
            return received(self.orders)
        except TimeoutError as error:
            raise ReplicaBroken("the other ranks are in a call that failed on this rank only") from error

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
                self.model.warm_up()
            case Trial():
                self.trials = self.trials or self.model.trials()
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
                assert self.named is not None, "Go arrived before Predict"
                self.predict(self.named)
            case Gather():
                self.gather()
            case LoadAdapter():
                self.host.load(order.name, order.directory)
            case UnloadAdapter():
                self.host.unload(order.name)

    @property
    def host(self) -> LoraHost:
        """This rank's LoRA host; it has one because the leader has."""
        assert isinstance(self.model, TakesLora)
        assert self.model.lora is not None
        return self.model.lora

    def tried(self, request_id: str, what: Callable[[], None]) -> None:
        """Run `what` and store a failure for that request: the leader gets it with the first call that needs its
        samples. Usually the leader's stage model fails the same way, and no such call comes."""
        try:
            what()
        except SegueError as error:
            self.failures[request_id] = error
            log.info("rank %d refuses request %s: %s", self.rank, request_id, error)
        # any kind: stage models process client input
        except Exception as error:
            self.failures[request_id] = error
            log.exception("rank %d cannot prepare request %s", self.rank, request_id)

    def begin(self, request: StageRequest) -> None:
        self.states[request.request_id] = self.model.begin(request)

    def feed(self, order: Feed) -> None:
        state = self.states[order.request_id]
        for sample in self.model.feed(state, order.upstream, order.payload, final=order.final):
            self.samples[order.request_id, sample.index] = sample

    def end(self, request_id: str) -> None:
        self.failures.pop(request_id, None)
        if request_id in self.states:
            self.model.end(self.states.pop(request_id))
        self.samples = {key: kept for key, kept in self.samples.items() if key[0] != request_id}

    def own(self, order: Predict) -> list[int]:
        """Indices of the rows that this rank computes, alone or with others."""
        return [
            place
            for place, (_, _, branch, _) in enumerate(order.rows)
            if self.ways.owner(branch) == self.ways.branch_part
        ]

    def ready(self, order: Predict) -> CallStatus:
        """Whether this rank can start its part of a call: it now holds memory for the latents, and its rows would fit
        too."""
        self.failed = False
        try:
            self.latents = self.room(order)
            rows = [self.row(*order.rows[place]) for place in self.own(order)]
            return CallStatus() if self.reserve.fits(rows) else NO_MEMORY
        # any kind, including the stage model's own errors: the leader waits for this answer
        except Exception as error:
            self.note(error)
            return status_of(error)

    def room(self, order: Predict) -> torch.Tensor:
        """Allocate the latents of a call: [rows, …]."""
        return torch.empty(order.shape, dtype=dtype_of(order.dtype), device=self.ways.everyone.device)

    def predict(self, order: Predict) -> None:
        """Raises `ReplicaBroken` if this rank runs out of memory while others are computing the same rows."""
        failure = None
        assert self.latents is not None, "a call started without memory for its latents"
        self.ways.everyone.broadcast(self.latents)
        try:
            self.made = self.computed(order, self.latents)
        # any kind: a network may raise anything, and the leader waits for an answer
        except Exception as error:
            failure = error
            self.note(error)
            if self.ways.network is not None and out_of_memory(error):
                raise ReplicaBroken(f"rank {self.rank} ran out of memory in the middle of a call") from error
        self.failed = failure is not None
        self.say(status_of(failure))

    def computed(self, order: Predict, latents: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = [self.row(*order.rows[place], latents[place : place + 1]) for place in self.own(order)]
        if not rows:
            return ()
        predict = self.model.predict
        if order.behind_first:
            assert isinstance(self.model, CachesBlocks)
            predict = self.model.predict_behind_first
        with self.model.during(rows), self.reserve.measured(rows):
            return predict(rows)

    def gather(self) -> None:
        """Send this rank's predictions to the leader, if it is the first of its part; the others have the same ones."""
        assert self.named is not None, "Gather arrived before Predict"
        if self.ways.heads is None:
            return
        assert self.latents is not None, "the gathered predictions need the latents' shape"
        gathered([branch for _, _, branch, _ in self.named.rows], self.made, self.ways, self.latents)

    def row(self, request_id: str, index: int, branch: int, step: int, latents: torch.Tensor | None = None) -> Row:
        """Raises `StageFailed` if this rank could not prepare the request's samples."""
        if request_id in self.failures:
            raise StageFailed(f"request {request_id} could not be prepared here") from self.failures[request_id]
        sample = self.samples[request_id, index]
        sample.step = step
        if latents is not None:
            sample.latents = latents
        return Row(sample, branch)

    def say(self, status: CallStatus) -> None:
        answer(self.orders, encode_status(status))

    def note(self, failure: Exception) -> None:
        """Log a failure with its traceback, unless it was logged before; the leader only learns that there was one."""
        if isinstance(failure, SegueError) and failure.__cause__ is None:
            log.info("rank %d: %s", self.rank, failure)
        else:
            log.error("rank %d cannot compute its rows", self.rank, exc_info=failure)
