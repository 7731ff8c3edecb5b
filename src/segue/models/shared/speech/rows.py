"""Rows that arrive from the stage before: which of them are new, and whether their codes exist."""

from __future__ import annotations

from torch import Tensor

from segue.messages.errors import StageFailed


def new_rows(rows: Tensor, start: int, taken: int, request_id: str) -> Tensor:
    """Those of `rows`, the first of which has index `start` in the request, that follow the `taken` first ones. A stage
    that was started again repeats rows. Raises `StageFailed` for rows that are missing."""
    if start > taken:
        raise StageFailed(f"rows {taken} to {start - 1} of request {request_id!r} never came")
    return rows[taken - start :]


def check_codes(codes: Tensor, size: int, specials: int = 0) -> None:
    """Raise `StageFailed` unless all codes are below `size`, or among the `specials` ids after it."""
    if len(wrong := codes[(codes < 0) | (codes >= size + specials)]):
        raise StageFailed(f"code {int(wrong[0])} is outside the codebook, which has codes 0 to {size - 1}")
