"""One call of a denoiser on several ranks (`segue.parallel.ways`).

- Guidance branches are computed in parallel (CFG parallel): in each call, part `branch % parts` computes a row. A row
  always stays with the same part, and so does its step cache.
- The network is divided: the ranks of a part compute each of its rows together, synchronised by the network's own
  collectives, so that each rank has the whole predictions.

Every rank runs the engine (`segue.engines.ranks`), and all make the same calls. A call ends with a broadcast of the
predictions from rank 0, which has gathered them from the first rank of each part: so guidance, schedulers and latents
are equal everywhere, to the bit.

Before a call of a divided network all ranks say whether they have the memory for it. If one has not, no rank starts,
and every engine repeats the call in halves. After a call they say whether it failed. A failure in the middle of an
exchange between ranks ends all of them, and new ones are started.

Optional reading: a replica of one rank computes a call's rows itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from segue.engines.diffusion.contract import DiffusionModel, Row
from segue.engines.diffusion.memory import Reserve
from segue.kernels.device import end_where_lost, out_of_memory
from segue.messages.errors import InvalidRequest, SegueError, StageFailed, error_from
from segue.parallel.group import ReplicaBroken
from segue.parallel.ranks import Ranks
from segue.parallel.ways import Ways
from segue.parallel.wire import dtype_name, dtype_of

log = logging.getLogger(__name__)

STRAY = 30.0
"""Seconds without a word after which a failed rank assumes that the other ranks are waiting for it."""

Compute = Callable[[Sequence[Row]], Sequence[torch.Tensor]]
"""Rows → their predictions, by this rank's network."""


class Status(msgspec.Struct, array_like=True):
    """The status of a rank after a step."""

    kind: str = ""
    """Class of its error; empty if there was none."""
    message: str = ""
    field: str | None = None
    no_memory: bool = False
    dtype: str = ""
    """Of its predictions; empty if it made none."""

    @classmethod
    def of(cls, failure: Exception | None) -> Status:
        """Raises `DeviceLost`."""
        if failure is None:
            return cls()
        end_where_lost(failure)
        field = failure.field if isinstance(failure, SegueError) else None
        return cls(type(failure).__name__, str(failure), field, out_of_memory(failure))

    @property
    def failure(self) -> str:
        """A readable description."""
        return f"{self.kind}: {self.message}" if self.kind else "nothing failed"


def shared_failure(ranks: Ranks, failure: Exception | None, what: str) -> Exception | None:
    """The failure of something that every rank does by itself, if one of them failed: rank 0's, or one that names the
    rank. `what`: what it could not do."""
    if ranks.alone:
        return failure
    if failure is not None and not ranks.first:
        note(failure, f"cannot {what}")
    statuses = ranks.every(Status.of(failure), Status)
    failed = next((rank for rank, one in enumerate(statuses) if one.kind), None)
    if failed is None or (failed == 0 and ranks.first):
        return failure
    return StageFailed(f"rank {failed} could not {what}; its log says why")


def note(failure: Exception, what: str) -> None:
    """Log a failure of this rank, with its traceback unless it is a refusal; others only learn that there was one."""
    if isinstance(failure, SegueError) and failure.__cause__ is None:
        log.info("this rank %s: %s", what, failure)
    else:
        log.error("this rank %s", what, exc_info=failure)


class Sharing:
    """The calls of one rank."""

    def __init__(self, model: DiffusionModel, ways: Ways, ranks: Ranks) -> None:
        self._ways = ways
        self._ranks = ranks
        self._divided = ways.network is not None
        self._reserve = Reserve(model, ways.everyone.device)

    def predict(self, rows: Sequence[Row], compute: Compute) -> Sequence[torch.Tensor]:
        """The predictions of all rows. Raises the call's failure, which on all ranks is one of memory or on none, or
        `ReplicaBroken`."""
        ways = self._ways
        own = [row for row in rows if ways.owner(row.branch) == ways.branch_part]
        room, failure = self._room(rows)
        if self._divided:
            self._check_memory(own, fits=room is not None)
        made: Sequence[torch.Tensor] = ()
        if failure is None:
            made, failure = self._computed(own, compute)
        del room
        mine = Status.of(failure)
        mine.dtype = dtype_name(made[0].dtype) if made else ""
        statuses = self._statuses(mine, failure)
        self._check_alike(statuses, failure)
        if any(one.kind for one in statuses):
            raise self._failure(statuses, failure)
        dtype = dtype_of(next(one.dtype for one in statuses if one.dtype))
        try:
            return self._exchanged(rows, made, dtype)
        except RuntimeError as error:
            raise self._broken(f"predictions cannot be exchanged: {error}") from error

    def _exchanged(self, rows: Sequence[Row], made: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """The predictions of all rows, from this rank's own. `dtype`: theirs."""
        ways, latents = self._ways, rows[0].sample.latents
        on_wire = torch.float32 if dtype.itemsize < 4 else dtype  # exact, and a type that every backend has
        whole = latents.new_empty(len(rows), *latents.shape[1:], dtype=on_wire)
        if ways.heads is not None:
            _gather([row.branch for row in rows], made, ways, whole)
        elif len(made) == len(rows):
            whole = torch.cat(list(made)).to(on_wire).contiguous()
        return list(ways.everyone.broadcast(whole).to(dtype).split(1))

    def _room(self, rows: Sequence[Row]) -> tuple[torch.Tensor | None, Exception | None]:
        """Memory as large as all predictions, held until they are exchanged; None and the failure if there is none."""
        latents = rows[0].sample.latents
        try:
            return latents.new_zeros(len(rows), *latents.shape[1:]), None
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None, error

    def _check_memory(self, own: Sequence[Row], *, fits: bool) -> None:
        """Raise `OutOfMemoryError` on all ranks if one lacks the memory for its rows, or has said so (`fits`)."""
        if not all(self._ranks.every(fits and self._reserve.fits(own), bool)):
            raise torch.OutOfMemoryError("no memory for the rows of a call")

    def _computed(self, own: Sequence[Row], compute: Compute) -> tuple[Sequence[torch.Tensor], Exception | None]:
        """This rank's part of a call. Raises `ReplicaBroken` if it runs out of memory while others wait for it."""
        try:
            with self._reserve.measured(own):
                made = compute(own) if own else ()
            if len(made) != len(own):
                raise StageFailed(f"the stage model gave {len(made)} predictions for {len(own)} rows")
            return made, None
        # any kind: a network may raise anything, and the other ranks wait for a word
        except Exception as error:
            if self._divided and out_of_memory(error):
                rank = self._ways.everyone.rank
                raise self._broken(f"rank {rank} ran out of memory in the middle of a call ({error})") from error
            if not self._ranks.first:
                note(error, "cannot compute its rows")
            return (), error

    def _statuses(self, mine: Status, cause: Exception | None) -> list[Status]:
        """The status of each rank. A rank in an exchange with failed ranks says nothing."""
        inner, size = self._ways.shape.inner, self._ways.shape.size

        def patience(known: Mapping[int, Status]) -> float | None:
            failed = {rank // inner for rank, one in known.items() if one.kind}
            silent = {rank // inner for rank in range(size) if rank not in known}
            return STRAY if failed & silent else None

        # rank 0 of another part waits for this rank, that of its own may be in an exchange with it
        alone = cause is not None and self._divided and self._ways.branch_part == 0
        return self._ranks.every(mine, Status, patience, STRAY if alone else None)

    def _check_alike(self, statuses: Sequence[Status], cause: Exception | None) -> None:
        """Check that the ranks of each part failed alike. If so, before any further exchange, only these rows fail;
        otherwise some ranks wait for others in a collective, and only new processes help."""
        inner = self._ways.shape.inner
        for first in range(0, len(statuses), inner):
            part = statuses[first : first + inner]
            if len({one.failure for one in part}) > 1:
                why = ", ".join(f"rank {first + rank}: {one.failure}" for rank, one in enumerate(part))
                raise self._broken(why) from cause

    def _failure(self, statuses: Sequence[Status], mine: Exception | None) -> Exception:
        """The failure of a call that some part's ranks could not compute, though others could. Whether it is for lack
        of memory is the same on all ranks."""
        full = [rank for rank, one in enumerate(statuses) if one.no_memory]
        if full:
            return torch.OutOfMemoryError(f"out of memory on rank {', '.join(map(str, full))} of {len(statuses)}")
        if mine is not None:
            return mine
        rank, first = next((rank, one) for rank, one in enumerate(statuses) if one.kind)
        refusal = error_from(first.kind, first.message, field=first.field)
        if isinstance(refusal, InvalidRequest):
            return refusal
        return StageFailed(f"rank {rank} could not compute its rows; its log says why")

    def _broken(self, why: str) -> ReplicaBroken:
        return ReplicaBroken(f"the ranks of a replica are out of step: {why}")


def _gather(branches: Sequence[int], made: Sequence[torch.Tensor], ways: Ways, whole: torch.Tensor) -> None:
    """Fill `whole` [rows, …] with the predictions of all heads for the rows of a call with these `branches`. `made`:
    this head's own, in order."""
    assert ways.heads is not None, "only heads gather predictions"
    places: list[list[int]] = [[] for _ in range(ways.shape.branches)]
    for place, branch in enumerate(branches):
        places[ways.owner(branch)].append(place)
    most = max(map(len, places))
    filled = whole.new_zeros(most, *whole.shape[1:])
    for number, prediction in enumerate(made):
        filled[number] = prediction[0]
    everything = ways.heads.all_gather(filled)
    for part, theirs in enumerate(places):
        for number, place in enumerate(theirs):
            whole[place] = everything[part * most + number]
