"""What the ranks of a denoiser tell each other of a call, and how their predictions meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.kernels.memory import out_of_memory
from segue.messages.errors import InvalidRequest, SegueError, StageFailed, error_from
from segue.parallel.row_orders import Fared
from segue.parallel.ways import Ways

STRAY = 30.0
"""Seconds after which a rank that has failed, and hears nothing of the others, takes them to wait for it."""


def told(failure: Exception | None) -> Fared:
    """How a rank fared, as others hear it."""
    if failure is None:
        return Fared()
    field = failure.field if isinstance(failure, SegueError) else None
    return Fared(type(failure).__name__, str(failure), field, out_of_memory(failure))


NO_MEMORY = Fared("OutOfMemoryError", "no memory for the rows of a call", no_memory=True)
"""What a rank says before a call for which it has none."""


def failure_of(fared: Sequence[Fared]) -> Exception:
    """The failure of a call that some rank, but no other of its part, could not compute."""
    ranks = [rank for rank, one in enumerate(fared) if one.no_memory]
    if ranks:
        return torch.OutOfMemoryError(f"out of memory on rank {', '.join(map(str, ranks))} of {len(fared)}")
    rank, first = next((rank, one) for rank, one in enumerate(fared) if one.kind)
    refusal = error_from(first.kind, first.message, field=first.field)
    if isinstance(refusal, InvalidRequest):
        return refusal
    return StageFailed(f"rank {rank} could not compute its rows; its log says why")


def gathered(
    branches: Sequence[int], made: Sequence[torch.Tensor], ways: Ways, latents: torch.Tensor
) -> list[torch.Tensor]:
    """The predictions of all heads, float32, for the rows of a call, whose branches these are. `made`: this head's own,
    in order; `latents`: [rows, …], as all predictions are."""
    assert ways.heads is not None, "only heads have what is gathered"
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
