"""How tests break files: cut off anywhere, some bytes changed."""

from __future__ import annotations

from hypothesis import strategies as st

_EDITS = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8)


def broken(files: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of `files`, cut off at some fraction of its length, with up to eight bytes changed near its start."""
    return st.builds(_break, st.sampled_from(files), st.floats(0.01, 1.0), _EDITS)


def _break(data: bytes, kept: float, edits: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data[: max(1, int(kept * len(data)))])
    for where, value in edits:
        changed[where % len(changed)] = value
    return bytes(changed)
