"""Other people's clients and test suites, unchanged, against `segue serve`: the programs of `tests/clients`, in an
environment of their own, which has the versions of its `requirements.txt` and nothing of Segue's."""

from __future__ import annotations

import hashlib
import runpy
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Served, served, tiny

from package_index import UNREACHED

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "tests" / "clients"
PROGRAMS = CLIENTS / "programs.py"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the clients' environment, made anew where `requirements.txt` has changed: 140 packages."""
    wanted = CLIENTS / "requirements.txt"
    directory = ROOT / "out" / "clients" / hashlib.sha256(wanted.read_bytes()).hexdigest()[:16]
    done = directory / "installed"
    if not done.exists():
        venv.create(directory, with_pip=True, clear=True)
        install = [directory / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "-r", wanted]
        installed = subprocess.run(install, capture_output=True, text=True, check=False)
        if installed.returncode and UNREACHED.search(installed.stderr):
            pytest.skip(f"the index of packages was not reached: {installed.stderr[-2000:]}")
        assert installed.returncode == 0, installed.stderr
        done.touch()
    return directory / "bin" / "python"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A language model whose template shows tools."""
    with served(tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")) as server:
        yield server


@pytest.mark.parametrize("name", runpy.run_path(str(PROGRAMS))["PROGRAMS"])
def test_a_client(name: str, python: Path, server: Served) -> None:
    subprocess.run([python, PROGRAMS, name, server.url], check=True)
    assert server.health()["ready"]
    assert "Traceback" not in server.log()
