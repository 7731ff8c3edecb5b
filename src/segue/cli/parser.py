"""The argument parser of all commands, and the type of its count arguments."""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """argparse's parser with two changes: an error is one line, with the nearest option; and errors in printing the
    help (a full disk, a closed pipe) are handled like those of other output. Sub-commands get parsers of the same
    class."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options. A sub-command's parser knows its own options, and passes unknown ones up."""
        known, others = super().parse_known_args(args, namespace)
        for word in others:
            if word.startswith("--"):
                option = word.partition("=")[0]
                close = get_close_matches(option, self._option_string_actions, n=1)
                self.error(f"unrecognized argument {option}{f', did you mean {close[0]}?' if close else ''}")
        return known, others

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        out = sys.stdout if file is None else file
        if out is not None:  # None if it was closed from the start
            out.write(self.format_help())


def count(text: str) -> int:
    """Parse a whole number above 0."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)
