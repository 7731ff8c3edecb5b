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
from segue.engines.diffusion.ranks import STRAY, gathered, told
from segue.messages.errors import SegueError, StageFailed
from segue.parallel.group import Group, ReplicaBroken
from segue.parallel.orders import LoadAdapter, UnloadAdapter, answer, dtype_of, received
from segue.parallel.row_orders import (
    Begin,
    End,
    Feed,
    Predict,
    RowOrder,
    Trial,
    WarmUp,
    decode_row_order,
    encode_fared,
)

log = logging.getLogger(__name__)


@torch.inference_mode()
def follow_rows(adapter: DiffusionAdapter, group: Group, orders: socket.socket, *, divided: bool = False) -> None:
    """Do what is this rank's of each call, until the leader closes its end; `divided` as the leader has it.

    Raises `ReplicaBroken` where this rank has failed in a call of a network that is divided, and the others have not.
    """
    follower = _Follower(adapter, group, orders, divided)
    while (data := follower.heard()) is not None:
        follower.obey(decode_row_order(data))


@dataclass(slots=True)
class _Follower:
    adapter: DiffusionAdapter
    group: Group
    orders: socket.socket
    divided: bool
    states: dict[str, Any] = field(default_factory=dict)
    samples: dict[tuple[str, int], Sample] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    """By request: why this rank has none of its samples."""
    trials: Iterator[Sample] | None = None
    failed: bool = False
    """The last call; of a divided network."""

    def heard(self) -> bytes | None:
        """The next order. Others that failed as well send one soon; those that did not wait for this rank."""
        self.orders.settimeout(STRAY if self.failed else None)
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
                self.predict(order)
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
            log.info("rank %d refuses request %s: %s", self.group.rank, request_id, error)
        except Exception as error:
            self.failures[request_id] = error
            log.exception("rank %d cannot prepare request %s", self.group.rank, request_id)

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

    def predict(self, order: Predict) -> None:
        latents = torch.empty(order.shape, dtype=dtype_of(order.dtype), device=self.group.device)
        self.group.broadcast(latents)
        predict = self.adapter.predict
        if order.behind_first:
            assert isinstance(self.adapter, CachesBlocks)
            predict = self.adapter.predict_behind_first

        def compute(places: Sequence[int]) -> Sequence[torch.Tensor]:
            rows = [self.row(*order.rows[place], latents[place : place + 1]) for place in places]
            with self.adapter.during(rows):
                return predict(rows)

        if self.divided:
            self.together(compute, len(order.rows))
            return
        answers = gathered([branch for _, _, branch, _ in order.rows], compute, self.group, latents)
        if isinstance(answers, Exception):
            self.say(answers)

    def together(self, compute: Callable[[Sequence[int]], Sequence[torch.Tensor]], rows: int) -> None:
        """A call of a network that is divided."""
        failure: Exception | None = None
        try:
            compute(range(rows))
        except Exception as error:
            failure = error
            self.say(error)
        self.failed = failure is not None
        answer(self.orders, encode_fared(told(failure)))

    def row(self, request_id: str, index: int, branch: int, step: int, latents: torch.Tensor) -> Row:
        """Raises what this rank could not make the sample for."""
        if request_id in self.failures:
            raise StageFailed(f"request {request_id} could not be prepared here") from self.failures[request_id]
        sample = self.samples[request_id, index]
        sample.step, sample.latents = step, latents
        return Row(sample, branch)

    def say(self, failure: Exception) -> None:
        """The leader is told that there was a failure; what it was is in the log, or was there already."""
        if isinstance(failure, SegueError) and failure.__cause__ is None:
            log.info("rank %d: %s", self.group.rank, failure)
        else:
            log.error("rank %d cannot compute its rows", self.group.rank, exc_info=failure)
