"""Check sizes of small checkpoints."""

from __future__ import annotations

from collections.abc import Collection

from segue.messages.errors import InvalidRequest, nearest


def check_size(size: str, known: Collection[str]) -> None:
    """Raise `InvalidRequest` for a size that a preset does not have."""
    if size not in known:
        raise InvalidRequest(f"no size {size!r}{nearest(size, known)}", field="size")
