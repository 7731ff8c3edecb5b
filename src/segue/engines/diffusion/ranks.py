"""One denoiser on several ranks (`segue.parallel.ways`): the leader's stage model and the exchange between ranks.

- Guidance branches are computed in parallel (CFG parallel): in each call, part `branch % parts` computes a row, and one
  gather collects all predictions. A row always stays with the same part, and so does its step cache.
- The network is divided: the ranks of a part compute each of its rows together, synchronised by the network's own
  collectives, so that each rank has the whole predictions.

The engine runs on the leader, and `RowLeader` looks to it like any other stage model. Followers make the same samples
from the same conditions (`segue.engines.diffusion.follower`). Only the leader runs scheduling, schedulers and guidance.

Before a call of a divided network all ranks report whether they have the memory for it. If one has not, no rank starts,
and the engine repeats the call in halves. A later failure, in the middle of an exchange between ranks, ends all of
them, and new ones are started."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from segue.engines.autoregressive.contract import LoraHost, TakesLora
from segue.engines.contract import Payload, StageRequest
from segue.engines.diffusion.contract import CachesBlocks, DiffusionModel, Row, Sample
from segue.engines.diffusion.memory import Reserve
from segue.kernels.device import end_where_lost, out_of_memory
from segue.kernels.linear.lora import Lora
from segue.messages.errors import ConfigError, InvalidRequest, SegueError, StageFailed, error_from
from segue.parallel.group import ReplicaBroken
from segue.parallel.orders import Crew, LoadAdapter, UnloadAdapter, dtype_name
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
    decode_status,
    encode_row_order,
)
from segue.parallel.ways import Ways

STRAY = 30.0
"""Seconds without an order after which a failed rank assumes that the other ranks are waiting for it."""


def status_of(failure: Exception | None) -> CallStatus:
    """A rank's status as sent to the others. Raises `DeviceLost`."""
    if failure is None:
        return CallStatus()
    end_where_lost(failure)
    field = failure.field if isinstance(failure, SegueError) else None
    return CallStatus(type(failure).__name__, str(failure), field, out_of_memory(failure))


NO_MEMORY = CallStatus("OutOfMemoryError", "no memory for the rows of a call", no_memory=True)
"""Status of a rank that lacks the memory for a call, sent before the call."""


def failure_of(status: Sequence[CallStatus]) -> Exception:
    """The failure of a call that some part's ranks could not compute, though others could."""
    ranks = [rank for rank, one in enumerate(status) if one.no_memory]
    if ranks:
        return torch.OutOfMemoryError(f"out of memory on rank {', '.join(map(str, ranks))} of {len(status)}")
    rank, first = next((rank, one) for rank, one in enumerate(status) if one.kind)
    refusal = error_from(first.kind, first.message, field=first.field)
    if isinstance(refusal, InvalidRequest):
        return refusal
    return StageFailed(f"rank {rank} could not compute its rows; its log says why")


def gathered(
    branches: Sequence[int], made: Sequence[torch.Tensor], ways: Ways, latents: torch.Tensor
) -> list[torch.Tensor]:
    """The float32 predictions of all heads for the rows of a call with these `branches`. `made`: this head's own, in
    order; `latents`: [rows, …], the shape of all predictions."""
    assert ways.heads is not None, "only heads gather predictions"
    places: list[list[int]] = [[] for _ in range(ways.shape.branches)]
    for place, branch in enumerate(branches):
        places[ways.owner(branch)].append(place)
    most = max(map(len, places))
    filled = latents.new_zeros(most, *latents.shape[1:], dtype=torch.float32)
    for number, prediction in enumerate(made):
        filled[number] = prediction[0]
    everything = ways.heads.all_gather(filled)
    answers = [latents[:0]] * len(branches)
    for part, theirs in enumerate(places):
        for number, place in enumerate(theirs):
            at = part * most + number
            answers[place] = everything[at : at + 1]
    return answers


class _LedAdapters:
    """The leader's LoRA adapters: followers load and unload the same ones. Implements `LoraHost`. Samples on every rank
    hold their own adapter, so an adapter's removal needs no further message."""

    def __init__(self, inner: LoraHost, tell: Callable[[RowOrder], None]) -> None:
        self._inner = inner
        self._tell = tell

    @property
    def loaded(self) -> Mapping[str, Lora]:
        return self._inner.loaded

    def load(self, name: str, directory: str) -> None:
        """Load it on the leader, which refuses invalid adapters before any follower receives the order."""
        self._inner.load(name, directory)
        self._tell(LoadAdapter(name, directory))

    def unload(self, name: str) -> None:
        self._inner.unload(name)
        self._tell(UnloadAdapter(name))


@dataclass(slots=True)
class _State:
    """State of a request, with the id that followers know it by."""

    request_id: str
    inner: Any


class RowLeader:
    """A `DiffusionModel` that shares the calls of the leader's own model with followers."""

    def __init__(self, inner: DiffusionModel, ways: Ways, crew: Crew) -> None:
        self.inner = inner
        self.weight_bytes = inner.weight_bytes
        self._ways = ways
        self._crew = crew
        self._divided = ways.network is not None
        self._reserve = Reserve(inner, ways.everyone.device)
        host = inner.lora if isinstance(inner, TakesLora) else None
        self.lora = None if host is None else _LedAdapters(host, self._tell)
        self._dtype: torch.dtype | None = None
        """Dtype of predictions."""
        self._serving = False

    def serve(self) -> None:
        """End of loading: from now on an error between the ranks is `ReplicaBroken`."""
        self._serving = True

    def warm_up(self) -> None:
        self._tell(WarmUp())
        self.inner.warm_up()

    def trials(self) -> Iterator[Sample]:
        """Rows with their first condition, which the leader computes alone unless the network is divided."""
        for sample in self.inner.trials():
            if self._divided:
                self._tell(Trial())
            yield sample

    def row_bytes(self, sample: Sample) -> int:
        return self.inner.row_bytes(sample)

    def begin(self, request: StageRequest) -> _State:
        inner = self.inner.begin(request)
        self._tell(Begin(msgspec.Raw(msgspec.msgpack.encode(request))))
        return _State(request.request_id, inner)

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> list[Sample]:
        self._tell(Feed(state.request_id, upstream, dict(payload), final))
        return self.inner.feed(state.inner, upstream, payload, final=final)

    def branches(self, sample: Sample) -> Sequence[int]:
        return self.inner.branches(sample)

    def bucket(self, sample: Sample) -> Hashable:
        return self.inner.bucket(sample)

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        return self._shared(rows, self.inner.predict, behind_first=False)

    def predict_behind_first(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        assert isinstance(self.inner, CachesBlocks), "the stage model accepted a step cache that it does not support"
        return self._shared(rows, self.inner.predict_behind_first, behind_first=True)

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        return self.inner.during(rows)

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.inner.combine(sample, predictions)

    def finish(self, sample: Sample) -> Payload:
        return self.inner.finish(sample)

    def preview(self, sample: Sample, prediction: torch.Tensor) -> Payload:
        return self.inner.preview(sample, prediction)

    def end(self, state: _State) -> None:
        self._tell(End(state.request_id))
        self.inner.end(state.inner)

    def _shared(
        self, rows: Sequence[Row], predict: Callable[[Sequence[Row]], Sequence[torch.Tensor]], *, behind_first: bool
    ) -> Sequence[torch.Tensor]:
        """One call in which each rank computes its rows, or its part of them; without followers if none has a row."""
        ways = self._ways
        own = [row for row in rows if ways.owner(row.branch) == 0]
        if not self._divided and len(own) == len(rows):
            made = predict(rows)
            self._dtype = made[0].dtype
            return made
        latents = torch.cat([row.sample.latents for row in rows])  # before the memory check, which excludes it
        if self._divided and not self._reserve.fits(own):
            raise torch.OutOfMemoryError(NO_MEMORY.message)
        named = [(row.sample.request_id, row.sample.index, row.branch, row.sample.step) for row in rows]
        self._tell(Predict(named, behind_first, list(latents.shape), dtype_name(latents.dtype)))
        if self._divided:
            before = self._statuses(CallStatus())
            if any(one.kind for one in before):
                raise failure_of(before)
            self._tell(Go())
        made, status = self._computed(own, predict, latents)
        self._check(status)
        self._dtype = made[0].dtype if made else self._dtype
        assert self._dtype is not None, "the first call of a sample includes the prompt's branch"
        if ways.heads is None:
            return made
        self._tell(Gather())
        try:
            everything = gathered([row.branch for row in rows], made, ways, latents)
        except RuntimeError as error:
            raise self._broken(f"predictions cannot be gathered: {error}") from error
        mine = iter(made)
        return [
            next(mine) if ways.owner(row.branch) == 0 else answer.to(self._dtype)
            for row, answer in zip(rows, everything, strict=True)
        ]

    def _computed(
        self, own: Sequence[Row], predict: Callable[[Sequence[Row]], Sequence[torch.Tensor]], latents: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], list[CallStatus]]:
        """This rank's part of a call, and the status of all ranks. Raises this rank's own failure if all ranks of its
        part failed alike."""
        made: Sequence[torch.Tensor] = []
        failure: Exception | None = None
        try:
            self._ways.everyone.broadcast(latents)
        except RuntimeError as error:
            raise self._broken(f"latents cannot be sent: {error}") from error
        try:
            with self._reserve.measured(own):
                made = predict(own) if own else []
        # any kind: a network may raise anything; it is raised again below, after the other ranks have answered
        except Exception as error:
            if self._divided and out_of_memory(error):
                raise self._broken(f"rank 0 ran out of memory in the middle of a call ({error})") from error
            failure = error
        status = self._statuses(status_of(failure), failure)
        if failure is not None:
            self._check_alike(status, failure)
            raise failure
        return made, status

    def _statuses(self, mine: CallStatus, cause: Exception | None = None) -> list[CallStatus]:
        """The status of each rank. A rank in an exchange with failed ranks does not answer."""
        inner = self._ways.shape.inner
        statuses: dict[int, CallStatus] = {0: mine}

        def patience() -> float | None:
            failed = {rank // inner for rank, one in statuses.items() if one.kind}
            silent = {rank // inner for rank in range(self._ways.shape.size) if rank not in statuses}
            return STRAY if failed & silent else None

        try:
            while len(statuses) < self._ways.shape.size:
                follower, data = self._crew.next_answer({rank - 1 for rank in statuses}, patience())
                statuses[follower + 1] = decode_status(data)
        except OSError as error:
            known = ", ".join(f"rank {rank}: {one.failure}" for rank, one in sorted(statuses.items()))
            raise self._broken(f"a follower does not answer ({error}); {known}") from cause
        return [statuses[rank] for rank in range(self._ways.shape.size)]

    def _check(self, status: Sequence[CallStatus]) -> None:
        """Raise the failure of a call that gave no predictions."""
        self._check_alike(status, None)
        if any(one.kind for one in status):
            raise failure_of(status)

    def _check_alike(self, status: Sequence[CallStatus], cause: Exception | None) -> None:
        """Check that the ranks of each part failed alike. If so, before any further exchange, only these rows fail;
        otherwise some ranks wait for others in a collective, and only new processes help."""
        inner = self._ways.shape.inner
        for first in range(0, len(status), inner):
            part = status[first : first + inner]
            if len({one.failure for one in part}) > 1:
                why = ", ".join(f"rank {first + rank}: {one.failure}" for rank, one in enumerate(part))
                raise self._broken(why) from cause

    def _broken(self, why: str) -> BaseException:
        if not self._serving:
            return ConfigError(f"the ranks of this stage cannot run the warm-up together: {why}")
        return ReplicaBroken(f"the ranks of a replica are out of step: {why}")

    def _tell(self, order: RowOrder) -> None:
        encoded = encode_row_order(order)
        try:
            self._crew.send(encoded)
        except OSError as error:
            raise ReplicaBroken(f"a follower of this replica is gone: {error}") from error
