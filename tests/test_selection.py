"""The order in which a slice of `make nightly` takes tests, and the tests that it never takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.fixture(scope="module", params=["a", "b", "c"])
def made(request): ...

@pytest.mark.nightly
@pytest.mark.parametrize("number", range(20))
def test_one_of_many(number): ...

@pytest.mark.nightly
@pytest.mark.parametrize("number", range(5))
def test_of_something_made(number, made): ...

@pytest.mark.nightly
@pytest.mark.named
def test_named(): ...
"""
PROFILE = "from hypothesis import settings\nsettings.register_profile('search')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(PROFILE)
    (tmp_path / "test_many.py").write_text(TESTS)
    return tmp_path


def taken(folder: Path, *arguments: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "selection", "--rootdir", ".", "--collect-only", "-q", "--nightly"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_the_order_in_a_file_is_drawn(folder: Path) -> None:
    """So that none is always last; what a fixture of the whole file makes is still made once. A test that must be named
    is left out, unless its file is named."""
    one, other = taken(folder, "--shuffle", "one"), taken(folder, "--shuffle", "other", "test_many.py")
    assert sorted([*one, "test_named"]) == sorted(other)
    assert len(one) == 35
    assert one != [name for name in other if name != "test_named"]
    for names in (one, other):
        made = [name.partition("[")[2][0] for name in names if "something" in name]
        assert sum(before != after for before, after in pairwise(made)) == 2


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports each by its bare name, so that a second one of that name would not be collected."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
