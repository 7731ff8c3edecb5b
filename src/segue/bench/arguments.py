"""What arguments of the benchmarks are made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from segue.messages.errors import nearest


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def counts(text: str) -> list[int]:
    """Such numbers, with commas between them."""
    return [count(part.strip()) for part in text.split(",")]


def some_of(known: Sequence[str], what: str = "baseline") -> Callable[[str], list[str]]:
    """Several by name, with commas between them, or `none`; `what` each of them is."""

    def parsed(text: str) -> list[str]:
        names = [] if text == "none" else [part.strip() for part in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}{nearest(name, (*known, 'none'))}")
        return names

    return parsed
