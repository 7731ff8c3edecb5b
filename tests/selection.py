"""Which tests run: pytest's options `--quick`, `--nightly`, `--shuffle`, `--minutes`; the markers `needs`, `named`.

`make test` runs every test but those marked `nightly`, `needs(name)` or `named`; `make nightly` runs the first two.
A file or a test that is named on the command line runs whole, however it is marked. The rules look at the tests
themselves; there is no list of them to keep."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
STARTED = time.monotonic()
MODEL_LIBRARIES = {"transformers", "diffusers"}
"""Whoever imports one of these has a model, or writes a checkpoint of one."""
PROCESSES = {"subprocess", "multiprocessing"}


def daily(names: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of which `kept` stay in `make test`; the others, which take the same paths, are nightly."""
    every = list(names)
    assert set(kept) <= set(every), f"there is no {sorted(set(kept) - set(every))} among {every}"
    return [name if name in kept else pytest.param(name, marks=pytest.mark.nightly) for name in every]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("segue", "which tests of Segue run")
    group.addoption("--quick", action="store_true", help="only tests that need no checkpoint and no other process")
    group.addoption(
        "--nightly",
        action="store_true",
        help="only tests marked nightly or needs, and property tests, these with examples that are new each time",
    )
    group.addoption("--shuffle", metavar="SEED", help="take files, and tests in them, in an order drawn from this")
    group.addoption("--minutes", type=float, metavar="N", help="begin no test later than this; those left are skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: proves again what other tests prove; runs in `make nightly`")
    config.addinivalue_line("markers", "named: runs only where it, or its file, is named on the command line")
    config.addinivalue_line("markers", "needs(name): runs where this package or program is there, in `make nightly`")
    if config.option.nightly:
        settings.load_profile("search")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick`, libraries of models are not even imported."""
    return (config.option.quick and collection_path.suffix == ".py" and reaches_far(collection_path)) or None


# before pytest brings tests together that share a parameter of a fixture: each of these is made once
@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_shuffled(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files, and tests in a file: where time runs out, each test comes first for some seed."""
    if config.option.shuffle is not None:

        def drawn(text: str) -> bytes:
            return hashlib.sha256(f"{config.option.shuffle} {text}".encode()).digest()

        items.sort(key=lambda item: (drawn(item.path.name), drawn(item.nodeid)))


@pytest.hookimpl(trylast=True)  # after the plugin that marks property tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.nightly:
        chosen = [item for item in items if is_nightly(item) or item.get_closest_marker("hypothesis")]
        chosen = [item for item in chosen if not item.get_closest_marker("named") or is_named(item, config)]
    else:
        chosen = [item for item in items if not is_nightly(item) or is_named(item, config)]
    if config.option.quick:
        chosen = [item for item in chosen if is_quick(item)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - STARTED > minutes * 60:
        pytest.skip(f"the {minutes:g} minutes of --minutes are over")
    for marker in item.iter_markers("needs"):
        name = marker.args[0]
        if importlib.util.find_spec(name) is None and shutil.which(name, path=Path(sys.executable).parent) is None:
            pytest.skip(f"{name} is not installed")


def is_nightly(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("nightly", "needs", "named"))


def is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command line names the test, or what it is in, down to its file."""
    own = item.nodeid.partition("::")[2]
    for argument in config.args:
        file, _, name = argument.partition("::")
        if (config.invocation_params.dir / file).resolve() == item.path and (
            name in ("", own) or own.startswith((f"{name}::", f"{name}["))
        ):
            return True
    return False


def is_quick(item: pytest.Item) -> bool:
    """Whether no fixture of the test makes a folder for several tests, as those of checkpoints do."""
    assert isinstance(item, pytest.Function)
    made = [fixture for fixtures in item._fixtureinfo.name2fixturedefs.values() for fixture in fixtures]
    return not item.get_closest_marker("slow") and all(
        fixture.argname == "tmp_path" or "tmp_path_factory" not in fixture.argnames for fixture in made
    )


@cache
def reaches_far(path: Path) -> bool:
    """Whether a file, or what it imports of tests/, has a model, a checkpoint or a process."""
    for module in imported(path):
        first = module.partition(".")[0]
        if first in MODEL_LIBRARIES | PROCESSES or module.endswith((".tiny", ".tiny.presets")):
            return True
        above = [folder for folder in path.parents if folder.is_relative_to(TESTS)]  # where `conftest.py` files are
        helper = next((file for folder in above if (file := folder / f"{first}.py").exists()), None)
        if helper not in (None, path) and reaches_far(helper):
            return True
    return False


def imported(path: Path) -> Iterator[str]:
    """Names of what a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
