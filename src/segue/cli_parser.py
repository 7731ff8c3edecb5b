"""The parser of every command line of ours, and the counts it reads."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """argparse's, which prints its help and drops what goes wrong with that: here a full disk, or a reader that has
    gone, is told of as with everything else that is printed. Its sub-commands get parsers of the same class."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        out = sys.stdout if file is None else file
        if out is not None:  # it is None where it was closed from the start
            out.write(self.format_help())


def count(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)
