"""A step's block tables as attention kernels read them: one row per sequence, int32, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from segue.kernels.part import Part, leading_singles
from segue.kernels.staging import upload


@dataclass(slots=True)
class StepTables:
    """Sequences in the order of the flat batch: first those with a single query."""

    singles: int
    blocks: torch.Tensor
    """[sequences, most]: what is behind a sequence's last block is not read."""
    lengths: torch.Tensor
    """[sequences] keys of each, those of its own queries included."""
    begins: torch.Tensor
    """[sequences] the flat token that is its first query."""
    counts: torch.Tensor
    """[sequences] its queries."""
    longest_key: int
    """Of the single queries: the most keys one of them sees."""
    longest_chunk: int
    """The most queries of one sequence among the others."""
    reaches: torch.Tensor | None = None
    """[tokens] how many keys each query sees, from the first on; None: all queries see what is before them."""


def step_tables(parts: Sequence[Part], block_size: int, device: torch.device) -> StepTables:
    """The tables of a step: one upload."""
    singles = leading_singles(parts)
    needed = [-(-part.stop // block_size) for part in parts]
    packed = np.zeros((len(parts), 3 + max(needed)), dtype=np.int32)
    begin = 0
    for row, part, count in zip(packed, parts, needed, strict=True):
        row[:3] = part.stop, begin, part.stop - part.start
        row[3 : 3 + count] = part.blocks[:count]
        begin += part.stop - part.start
    there = upload(packed, device)
    mutual = any(not part.causal for part in parts)
    return StepTables(
        singles=singles,
        blocks=there[:, 3:],
        lengths=there[:, 0].contiguous(),
        begins=there[:, 1].contiguous(),
        counts=there[:, 2].contiguous(),
        longest_key=max((part.stop for part in parts[:singles]), default=0),
        longest_chunk=max((part.stop - part.start for part in parts[singles:]), default=0),
        reaches=upload(np.concatenate([part.reaches() for part in parts]), device) if mutual else None,
    )
