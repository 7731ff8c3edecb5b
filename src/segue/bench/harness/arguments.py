"""Options of a benchmark, declared as fields of a dataclass, and its sub-command.

A dataclass field made by `option` is a command-line option of the same name: `preset_size` is `--preset-size`. Fields
made otherwise are not on the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from segue.cli.parser import Parser, count
from segue.messages.errors import ConfigError, nearest


def progress(line: str) -> None:
    """Print a progress line, to another stream than the results."""
    print(line, file=sys.stderr, flush=True)


def option(default: Any, said: str | None = None, **more: Any) -> Any:
    """A field with a command-line option. `said`: its help; `more`: arguments of `add_argument`, and `exclusive` for an
    option that excludes the others so marked."""
    return field(default_factory=lambda: copy(default), metadata={"option": True, "help": said, **more})


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The options of every benchmark, and where its results go."""

    out: Path = option(Path("out/bench"), "directory of the results", type=Path)
    path: Path = Path("result.json")
    """The result's file."""
    keep: Callable[[Any], None] = lambda result: None
    """Receives the result so far after every level."""
    say: Callable[[str], None] = progress


@dataclass(frozen=True, kw_only=True)
class ModelBench(Bench):
    """Options of benchmarks that start sides on a checkpoint."""

    model: Path | None = option(None, "directory of a checkpoint", type=Path, exclusive=True)
    cache: Path = option(Path("out"), "where presets are made (default: out)", type=Path)
    seed: int = option(0, type=int)

    @property
    def model_dir(self) -> Path:
        assert self.model is not None, "the preset has been made"
        return self.model.resolve()


@dataclass(frozen=True, kw_only=True)
class DeviceBench(Bench):
    """Options of benchmarks that compute in this process."""

    device: str = option("cuda:0", "cpu or cuda:N (default: cuda:0)")
    dtype: str = option("bfloat16", choices=["bfloat16", "float16", "float32"])


_INSTALLED_BY = {"action_video": "pip install -e examples/own_model, in a checkout of Segue"}
"""Package → the command that installs it, if it is not in the extra `bench`."""

BenchT = TypeVar("BenchT", bound=Bench)
ResultT = TypeVar("ResultT")


def add_command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    said: str,
    options: type[BenchT],
    run: Callable[[BenchT], int],
    needs: Sequence[str] = (),
) -> None:
    """Add a sub-command with the options of a dataclass. `run` gets an instance, and returns the exit status; `needs`:
    packages that must be installed."""
    command = commands.add_parser(name, help=said)
    own = [one for one in fields(options) if one.metadata]
    excluding = any("exclusive" in one.metadata for one in own)
    exclusive = command.add_mutually_exclusive_group() if excluding else command
    for one in own:
        given = {name: value for name, value in one.metadata.items() if name not in ("option", "exclusive")}
        assert callable(one.default_factory)
        default = one.default_factory()
        given |= {"action": "store_true"} if isinstance(default, bool) else {"default": default}
        group = exclusive if "exclusive" in one.metadata else command
        group.add_argument(f"--{one.name.replace('_', '-')}", **given)

    def start(arguments: argparse.Namespace) -> int:
        missing = [package for package in needs if find_spec(package) is None]
        if missing:
            commands = dict.fromkeys(_INSTALLED_BY.get(name, "pip install 'segue[bench]'") for name in missing)
            raise ConfigError(f"segue bench needs {' and '.join(missing)}: {' and '.join(commands)}")
        return run(options(**{one.name: getattr(arguments, one.name) for one in own}))

    command.set_defaults(run=start)


def execute(
    bench: BenchT,
    name: str,
    run: Callable[[BenchT], Coroutine[Any, Any, ResultT]],
    markdown: Callable[[ResultT], str],
    plot: Callable[[ResultT, Path], None] | None = None,
) -> int:
    """Run a benchmark whose result goes to a new file `name`.json, and write its report. Returns the exit status: 1 if
    the result lists failures."""
    from segue.bench.harness.report import result_path, write_report  # with torch: not for --help
    from segue.bench.harness.results import write_result

    path = result_path(bench.out, name)
    ready = replace(bench, path=path, keep=lambda so_far: write_result(so_far, path))
    try:
        result: Any = asyncio.run(run(ready))
    except asyncio.CancelledError:  # the sides have been stopped
        return 128 + signal.SIGTERM
    write_report(result, path, markdown, plot)
    return 1 if getattr(result, "failures", None) else 0


def counts(text: str) -> list[int]:
    """Parse different positive integers separated by commas."""
    return list(dict.fromkeys(count(part.strip()) for part in text.split(",")))


def rates(text: str) -> list[float]:
    """Parse positive numbers separated by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(rate > 0 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0, with commas between them")
    return found


def some_of(known: Sequence[str], what: str = "baseline") -> Callable[[str], list[str]]:
    """Parse several names separated by commas, or `none`; `what` describes a name in errors."""

    def parsed(text: str) -> list[str]:
        names = [] if text == "none" else [part.strip() for part in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}{nearest(name, (*known, 'none'))}")
        return names

    return parsed
