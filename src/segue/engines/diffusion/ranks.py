"""One denoiser on several ranks, in one of two ways.

- Guidance branches are computed side by side (CFG parallel): each rank has all weights, at each call rank
  `branch % ranks` computes a row, and all predictions meet in one gather. A row is always with the same rank, so what a
  step cache keeps of it is there too.
- The network is divided: every rank computes its part of every row, and the network's own collectives keep the ranks
  together, so that each has the whole predictions.

The engine runs on the leader and sees an adapter like any other. Followers make the same samples from the same
conditions (`segue.engines.diffusion.row_follower`). Scheduling, schedulers and guidance are the leader's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from segue.engines.autoregressive.contract import LoraHost, TakesLora
from segue.engines.contract import Payload, StageRequest
from segue.engines.diffusion.contract import CachesBlocks, DiffusionAdapter, Row, Sample
from segue.engines.diffusion.room import out_of_memory
from segue.kernels.lora import Lora
from segue.messages.errors import ConfigError, StageFailed
from segue.parallel.group import Group, ReplicaBroken
from segue.parallel.orders import Crew, LoadAdapter, UnloadAdapter, dtype_name
from segue.parallel.row_orders import (
    Begin,
    End,
    Fared,
    Feed,
    Predict,
    RowOrder,
    Trial,
    WarmUp,
    decode_fared,
    encode_row_order,
)

_FINE, _FAILED, _NO_MEMORY = 0, 1, 2
STRAY = 30.0
"""Seconds after which a rank that has failed, and hears nothing of the others, takes them to wait for it."""


class _LedAdapters:
    """The leader's LoRA adapters: what it loads, followers load. Implements `LoraHost`. Samples hold their own, there
    as here, so that nobody has to be told when one is forgotten."""

    def __init__(self, inner: LoraHost, tell: Callable[[RowOrder], None]) -> None:
        self._inner = inner
        self._tell = tell

    @property
    def loaded(self) -> Mapping[str, Lora]:
        return self._inner.loaded

    def load(self, name: str, directory: str) -> None:
        """As the leader's own, which refuses what cannot be loaded before anyone else hears of it."""
        self._inner.load(name, directory)
        self._tell(LoadAdapter(name, directory))

    def unload(self, name: str) -> None:
        self._inner.unload(name)
        self._tell(UnloadAdapter(name))


@dataclass(slots=True)
class _State:
    """Of a request, with the name followers know it by."""

    request_id: str
    inner: Any


class RowLeader:
    """`DiffusionAdapter` over the leader's own, whose calls the followers share."""

    def __init__(self, inner: DiffusionAdapter, group: Group, crew: Crew, *, divided: bool = False) -> None:
        """`divided`: the network is, so all ranks are in every call; else guidance branches are."""
        self.inner = inner
        self.weight_bytes = inner.weight_bytes
        self._group = group
        self._crew = crew
        self._divided = divided
        host = inner.lora if isinstance(inner, TakesLora) else None
        self.lora = None if host is None else _LedAdapters(host, self._tell)
        self._dtype: torch.dtype | None = None
        """Of predictions."""
        self._serving = False

    def serve(self) -> None:
        """Loading is over: from now on an error between the ranks is `ReplicaBroken`."""
        self._serving = True

    def warm_up(self) -> None:
        if self._divided:
            self._tell(WarmUp())
        self.inner.warm_up()

    def trials(self) -> Iterator[Sample]:
        """Rows under their first condition, which are the leader's unless the network is divided."""
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
        """One call, each rank with its own rows or its part of all; the leader alone where all rows are its own."""
        if not self._divided and all(owner(row.branch, self._group) == 0 for row in rows):
            made = predict(rows)
            self._dtype = made[0].dtype
            return made
        named = [(row.sample.request_id, row.sample.index, row.branch, row.sample.step) for row in rows]
        latents = torch.cat([row.sample.latents for row in rows])
        self._tell(Predict(named, behind_first, list(latents.shape), dtype_name(latents.dtype)))
        if self._divided:
            return self._together(rows, predict, latents)
        try:
            self._group.broadcast(latents)
            answers = gathered(
                [row.branch for row in rows],
                lambda places: predict([rows[place] for place in places]),
                self._group,
                latents,
            )
        except RuntimeError as error:
            if not self._serving or out_of_memory(error):
                raise
            raise ReplicaBroken(f"the ranks of a replica are out of step: {error}") from error
        if isinstance(answers, Exception):
            raise answers
        own = [answer for answer, row in zip(answers, rows, strict=True) if owner(row.branch, self._group) == 0]
        self._dtype = own[0].dtype if own else self._dtype
        assert self._dtype is not None, "the first call of a sample has the prompt's branch"
        return [answer.to(self._dtype) for answer in answers]

    def _together(
        self, rows: Sequence[Row], predict: Callable[[Sequence[Row]], Sequence[torch.Tensor]], latents: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """A call of a network that is divided. What all ranks fail with alike, before they exchange anything more, is
        the failure of these rows; otherwise some wait for others in a collective, and only new processes help."""
        made: Sequence[torch.Tensor] = []
        failure: Exception | None = None
        try:
            self._group.broadcast(latents)
            made = predict(rows)
        except Exception as error:
            failure = error
        try:
            answers = [decode_fared(data) for data in self._crew.answers(None if failure is None else STRAY)]
        except OSError as error:
            raise self._broken(f"a follower does not answer ({error}); this rank: {told(failure)}") from failure
        everyone = [told(failure), *answers]
        if any(one.no_memory for one in everyone) or len({one.failure for one in everyone}) > 1:
            why = ", ".join(f"rank {rank}: {one.failure}" for rank, one in enumerate(everyone))
            raise self._broken(why) from failure
        if failure is not None:
            raise failure
        return made

    def _broken(self, why: str) -> BaseException:
        if not self._serving:
            return ConfigError(f"the ranks of this stage cannot make a call of the warm-up together: {why}")
        return ReplicaBroken(f"the ranks of a replica are out of step: {why}")

    def _tell(self, order: RowOrder) -> None:
        encoded = encode_row_order(order)
        try:
            self._crew.send(encoded)
        except OSError as error:
            raise ReplicaBroken(f"a follower of this replica is gone: {error}") from error


def told(failure: Exception | None) -> Fared:
    """How a rank fared, as others hear it."""
    if failure is None:
        return Fared(None)
    return Fared(f"{type(failure).__name__}: {failure}", out_of_memory(failure))


def owner(branch: int, group: Group) -> int:
    """The rank that computes the rows of a guidance branch."""
    return branch % group.size


def gathered(
    branches: Sequence[int],
    compute: Callable[[Sequence[int]], Sequence[torch.Tensor]],
    group: Group,
    latents: torch.Tensor,
) -> list[torch.Tensor] | Exception:
    """The predictions of all ranks for the rows of a call, whose branches these are, or why there are none. `compute`:
    gives those of some places; `latents`: [rows, …], as all predictions are.

    Those of others are float32, this rank's own as they are. Every rank learns how the others fared before anything
    is gathered, so that an error leaves them in step.
    """
    places: list[list[int]] = [[] for _ in range(group.size)]
    for place, branch in enumerate(branches):
        places[owner(branch, group)].append(place)
    own = places[group.rank]
    made: Sequence[torch.Tensor] = []
    failure: Exception | None = None
    try:
        made = compute(own) if own else []
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
    answers = [latents[:0]] * len(branches)
    for rank, theirs in enumerate(places):
        for number, place in enumerate(theirs):
            at = rank * most + number
            answers[place] = made[number] if rank == group.rank else everything[at : at + 1]
    return answers
