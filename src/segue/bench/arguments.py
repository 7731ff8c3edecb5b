"""What arguments of the benchmarks are made of."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from segue.cli_parser import Parser, count
from segue.messages.errors import ConfigError, nearest


def counts(text: str) -> list[int]:
    """Whole numbers above 0, with commas between them."""
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


def add_out(command: Parser) -> None:
    """Where the results go."""
    command.add_argument("--out", type=Path, default=Path("out/bench"), help="directory of the results")


def add_device(command: Parser) -> None:
    """What a bench in this process computes on."""
    command.add_argument("--device", default="cuda:0", help="cpu or cuda:N (default: cuda:0)")
    command.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")


def check_installed(packages: Sequence[str]) -> None:
    """Raises `ConfigError` with the names of those that are missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"segue bench needs {' and '.join(missing)}: pip install 'segue[bench]'")


def progress(line: str) -> None:
    """What a bench says while it runs: apart from its results."""
    print(line, file=sys.stderr, flush=True)
