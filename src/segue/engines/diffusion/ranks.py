"""One denoiser on several ranks, each with all weights: guidance branches are computed side by side (CFG parallel).

The engine runs on the leader and sees an adapter like any other. Followers make the same samples from the same
conditions; at each call rank `branch % ranks` computes a row, and all predictions meet in one gather. Scheduling,
schedulers and guidance are the leader's alone. A row is always with the same rank, so what a step cache keeps of it is
there too.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from segue.engines.contract import Payload, StageRequest
from segue.engines.diffusion.contract import CachesBlocks, DiffusionAdapter, Row, Sample
from segue.engines.diffusion.room import out_of_memory
from segue.messages.errors import StageFailed
from segue.parallel.group import Group, ReplicaBroken
from segue.parallel.orders import Crew, received
from segue.parallel.row_orders import Begin, End, Feed, Predict, RowOrder, decode_row_order, encode_row_order

_FINE, _FAILED, _NO_MEMORY = 0, 1, 2


@dataclass(slots=True)
class _State:
    """Of a request, with the name followers know it by."""

    request_id: str
    inner: Any


class RowLeader:
    """`DiffusionAdapter` over the leader's own, whose calls the followers share."""

    def __init__(self, inner: DiffusionAdapter, group: Group, crew: Crew) -> None:
        self.inner = inner
        self.weight_bytes = inner.weight_bytes
        self._group = group
        self._crew = crew
        self._dtype: torch.dtype | None = None
        """Of predictions."""
        self._serving = False

    def serve(self) -> None:
        """Loading is over: from now on an error between the ranks is `ReplicaBroken`."""
        self._serving = True

    def warm_up(self) -> None:
        self.inner.warm_up()

    def trials(self) -> Iterator[Sample]:
        """Rows under their first condition, which are the leader's."""
        return self.inner.trials()

    def row_bytes(self, sample: Sample) -> int:
        return self.inner.row_bytes(sample)

    def begin(self, request: StageRequest) -> _State:
        self._tell(Begin(msgspec.Raw(msgspec.msgpack.encode(request))))
        return _State(request.request_id, self.inner.begin(request))

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
        assert isinstance(self.inner, CachesBlocks), "the adapter refuses what it cannot do"
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
        """One call, each rank with its own rows; the leader alone where all are its own."""
        if all(_owner(row.branch, self._group) == 0 for row in rows):
            made = predict(rows)
            self._dtype = made[0].dtype
            return made
        named = [(row.sample.request_id, row.sample.index, row.branch, row.sample.step) for row in rows]
        self._tell(Predict(named, behind_first))
        latents = torch.cat([row.sample.latents for row in rows])
        try:
            self._group.broadcast(latents)
            answers = _gathered(rows, predict, self._group, latents)
        except RuntimeError as error:
            if not self._serving or out_of_memory(error):
                raise
            raise ReplicaBroken(f"the ranks of a replica are out of step: {error}") from error
        if isinstance(answers, Exception):
            raise answers
        own = [answer for answer, row in zip(answers, rows, strict=True) if _owner(row.branch, self._group) == 0]
        self._dtype = own[0].dtype if own else self._dtype
        assert self._dtype is not None, "the first call of a sample has the prompt's branch"
        return [answer.to(self._dtype) for answer in answers]

    def _tell(self, order: RowOrder) -> None:
        try:
            self._crew.send(encode_row_order(order))
        except OSError as error:
            raise ReplicaBroken(f"a follower of this replica is gone: {error}") from error


@torch.inference_mode()
def follow_rows(adapter: DiffusionAdapter, group: Group, orders: socket.socket) -> None:
    """Do the rows that are this rank's, until the leader closes its end."""
    follower = _Follower(adapter, group)
    while (data := received(orders)) is not None:
        follower.obey(decode_row_order(data))


@dataclass(slots=True)
class _Follower:
    adapter: DiffusionAdapter
    group: Group
    states: dict[str, Any] = field(default_factory=dict)
    samples: dict[tuple[str, int], Sample] = field(default_factory=dict)

    def obey(self, order: RowOrder) -> None:
        match order:
            case Begin():
                request = msgspec.msgpack.decode(order.request, type=StageRequest)
                self.states[request.request_id] = self.adapter.begin(request)
            case Feed():
                self.feed(order)
            case End():
                self.adapter.end(self.states.pop(order.request_id))
                self.samples = {key: kept for key, kept in self.samples.items() if key[0] != order.request_id}
            case Predict():
                self.predict(order)

    def feed(self, order: Feed) -> None:
        state = self.states[order.request_id]
        try:
            samples = self.adapter.feed(state, order.upstream, order.payload, final=order.final)
        except Exception:  # the leader's adapter says the same, and the request ends there
            return
        for sample in samples:
            self.samples[order.request_id, sample.index] = sample

    def predict(self, order: Predict) -> None:
        rows = []
        for request_id, index, branch, step in order.rows:
            sample = self.samples[request_id, index]
            sample.step = step
            rows.append(Row(sample, branch))
        latents = self.group.broadcast(torch.cat([row.sample.latents for row in rows]))
        for place, row in enumerate(rows):
            row.sample.latents = latents[place : place + 1]
        predict = self.adapter.predict
        if order.behind_first:
            assert isinstance(self.adapter, CachesBlocks)
            predict = self.adapter.predict_behind_first
        _gathered(rows, predict, self.group, latents)


def _owner(branch: int, group: Group) -> int:
    return branch % group.size


def _gathered(
    rows: Sequence[Row],
    predict: Callable[[Sequence[Row]], Sequence[torch.Tensor]],
    group: Group,
    latents: torch.Tensor,
) -> list[torch.Tensor] | Exception:
    """The predictions of all ranks for `rows`, or why there are none; `latents`: [rows, …], as all predictions are.

    Those of others are float32, this rank's own as they are. Every rank learns how the others fared before anything
    is gathered, so that an error leaves them in step.
    """
    places: list[list[int]] = [[] for _ in range(group.size)]
    for place, row in enumerate(rows):
        places[_owner(row.branch, group)].append(place)
    own = places[group.rank]
    made: Sequence[torch.Tensor] = []
    failure: Exception | None = None
    try:
        made = predict([rows[place] for place in own]) if own else []
    except Exception as error:
        failure = error
    fared = _FINE if failure is None else _NO_MEMORY if out_of_memory(failure) else _FAILED
    all_fared = group.all_gather(torch.tensor([fared], device=latents.device)).tolist()
    if failure is not None:
        return failure
    if _NO_MEMORY in all_fared:
        return torch.OutOfMemoryError("out of memory on another rank")
    if _FAILED in all_fared:
        return StageFailed(f"rank {all_fared.index(_FAILED)} could not compute its rows; its log says why")
    most = max(map(len, places))
    filled = latents.new_zeros(most, *latents.shape[1:], dtype=torch.float32)
    for number, prediction in enumerate(made):
        filled[number] = prediction[0]
    everything = group.all_gather(filled)
    answers = [latents[:0]] * len(rows)
    for rank, theirs in enumerate(places):
        for number, place in enumerate(theirs):
            at = rank * most + number
            answers[place] = made[number] if rank == group.rank else everything[at : at + 1]
    return answers
