"""Parsers and groups of arguments that the benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from segue.cli.parser import Parser, count
from segue.messages.errors import ConfigError, nearest


def counts(text: str) -> list[int]:
    """Parse positive integers separated by commas."""
    return [count(part.strip()) for part in text.split(",")]


def some_of(known: Sequence[str], what: str = "baseline") -> Callable[[str], list[str]]:
    """Parse several names separated by commas, or `none`; `what` describes a name in errors."""

    def parsed(text: str) -> list[str]:
        names = [] if text == "none" else [part.strip() for part in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}{nearest(name, (*known, 'none'))}")
        return names

    return parsed


def add_out(command: Parser) -> None:
    """Add the argument for the directory of results."""
    command.add_argument("--out", type=Path, default=Path("out/bench"), help="directory of the results")


def add_device(command: Parser) -> None:
    """Add the argument for the device of a benchmark that computes in this process."""
    command.add_argument("--device", default="cuda:0", help="cpu or cuda:N (default: cuda:0)")
    command.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")


def check_installed(packages: Sequence[str]) -> None:
    """Raises `ConfigError` with the names of missing packages."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"segue bench needs {' and '.join(missing)}: pip install 'segue[bench]'")


def progress(line: str) -> None:
    """Print a progress line, to another stream than the results."""
    print(line, file=sys.stderr, flush=True)
