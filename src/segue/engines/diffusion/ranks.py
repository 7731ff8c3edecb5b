"""One denoiser on several ranks (`segue.parallel.ways`).

- Guidance branches are computed side by side (CFG parallel): at each call part `branch % parts` computes a row, and all
  predictions meet in one gather. A row is always with the same part, so what a step cache keeps of it is there too.
- The network is divided: the ranks of a part compute each of its rows together, and the network's own collectives keep
  them together, so that each has the whole predictions.

The engine runs on the leader and sees an adapter like any other. Followers make the same samples from the same
conditions (`segue.engines.diffusion.row_follower`). Scheduling, schedulers and guidance are the leader's alone.

Before a call of a divided network all ranks say whether they have the memory for it. Where one has not, nobody begins,
and the engine makes the call again in halves. What goes wrong later, in the middle of what ranks exchange, ends all of
them, and new ones are started.
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
from segue.engines.diffusion.exchange import NO_MEMORY, STRAY, failure_of, gathered, told
from segue.engines.diffusion.reserve import Reserve
from segue.kernels.lora import Lora
from segue.kernels.memory import out_of_memory
from segue.messages.errors import ConfigError
from segue.parallel.group import ReplicaBroken
from segue.parallel.orders import Crew, LoadAdapter, UnloadAdapter, dtype_name
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
    decode_fared,
    encode_row_order,
)
from segue.parallel.ways import Ways


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

    def __init__(self, inner: DiffusionAdapter, ways: Ways, crew: Crew) -> None:
        self.inner = inner
        self.weight_bytes = inner.weight_bytes
        self._ways = ways
        self._crew = crew
        self._divided = ways.network is not None
        self._reserve = Reserve(inner, ways.everyone.device)
        host = inner.lora if isinstance(inner, TakesLora) else None
        self.lora = None if host is None else _LedAdapters(host, self._tell)
        self._dtype: torch.dtype | None = None
        """Of predictions."""
        self._serving = False

    def serve(self) -> None:
        """Loading is over: from now on an error between the ranks is `ReplicaBroken`."""
        self._serving = True

    def warm_up(self) -> None:
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
        """One call, each rank with its own rows or its part of them; the leader alone where it needs nobody."""
        ways = self._ways
        own = [row for row in rows if ways.owner(row.branch) == 0]
        if not self._divided and len(own) == len(rows):
            made = predict(rows)
            self._dtype = made[0].dtype
            return made
        latents = torch.cat([row.sample.latents for row in rows])  # first: it is not to be had of what rows need
        if self._divided and not self._reserve.had(own):
            raise torch.OutOfMemoryError(NO_MEMORY.message)
        named = [(row.sample.request_id, row.sample.index, row.branch, row.sample.step) for row in rows]
        self._tell(Predict(named, behind_first, list(latents.shape), dtype_name(latents.dtype)))
        if self._divided:
            before = self._heard(Fared())
            if any(one.kind for one in before):
                raise failure_of(before)
            self._tell(Go())
        made, fared = self._computed(own, predict, latents)
        self._check(fared)
        self._dtype = made[0].dtype if made else self._dtype
        assert self._dtype is not None, "the first call of a sample has the prompt's branch"
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
    ) -> tuple[Sequence[torch.Tensor], list[Fared]]:
        """This rank's part of a call, and how all ranks fared. What it fails with itself is raised where it was no
        rank's doing."""
        made: Sequence[torch.Tensor] = []
        failure: Exception | None = None
        try:
            self._ways.everyone.broadcast(latents)
        except RuntimeError as error:
            raise self._broken(f"latents cannot be sent: {error}") from error
        try:
            with self._reserve.measured(own):
                made = predict(own) if own else []
        # any kind: networks raise what they like; it is raised again below, when the others have been heard
        except Exception as error:
            if self._divided and out_of_memory(error):
                raise self._broken(f"rank 0 ran out of memory in the middle of a call ({error})") from error
            failure = error
        fared = self._heard(told(failure), failure)
        if failure is not None:
            self._check_alike(fared, failure)
            raise failure
        return made, fared

    def _heard(self, mine: Fared, cause: Exception | None = None) -> list[Fared]:
        """How each rank fares. One that exchanges with others that failed does not answer."""
        inner = self._ways.shape.inner
        heard: dict[int, Fared] = {0: mine}

        def patience() -> float | None:
            failed = {rank // inner for rank, one in heard.items() if one.kind}
            silent = {rank // inner for rank in range(self._ways.shape.size) if rank not in heard}
            return STRAY if failed & silent else None

        try:
            while len(heard) < self._ways.shape.size:
                follower, data = self._crew.next_answer({rank - 1 for rank in heard}, patience())
                heard[follower + 1] = decode_fared(data)
        except OSError as error:
            known = ", ".join(f"rank {rank}: {one.failure}" for rank, one in sorted(heard.items()))
            raise self._broken(f"a follower does not answer ({error}); {known}") from cause
        return [heard[rank] for rank in range(self._ways.shape.size)]

    def _check(self, fared: Sequence[Fared]) -> None:
        """Raises why a call gave no predictions."""
        self._check_alike(fared, None)
        if any(one.kind for one in fared):
            raise failure_of(fared)

    def _check_alike(self, fared: Sequence[Fared], cause: Exception | None) -> None:
        """What all ranks of a part fail with alike, before they exchange anything more, is the failure of these rows;
        otherwise some wait for others in a collective, and only new processes help."""
        inner = self._ways.shape.inner
        for first in range(0, len(fared), inner):
            part = fared[first : first + inner]
            if len({one.failure for one in part}) > 1:
                why = ", ".join(f"rank {first + rank}: {one.failure}" for rank, one in enumerate(part))
                raise self._broken(why) from cause

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
