"""What a user installs: the Makefile's commands, the source distribution, and a wheel built without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from markdown_blocks import ROOT

BUILD = "import sys\nfrom setuptools import build_meta\nbuild_meta.build_sdist(sys.argv[1])\n"
WHEEL = BUILD.replace("sdist", "wheel")


def make(target: str, *variables: str) -> str:
    """The commands that make would run where nothing was made before."""
    command = ["make", "--dry-run", "--always-make", target, *variables]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("target", ["serve", "demo"])
def test_make_runs_the_model_that_is_asked_for(target: str) -> None:
    assert "'examples/segue-shapes'" in make(target)
    for model in ("/somewhere/else", "/with a/space in it", "Qwen/Qwen2.5-Omni-7B"):
        assert f"'{model}'" in make(target, f"MODEL={model}")


def test_make_hands_arguments_to_pip() -> None:
    assert "-c constraints.txt --find-links wheels -e '.[dev]'" in make("check", "PIP_ARGS=--find-links wheels")
    assert "wheels" not in make("check")


def test_nightly_installs_no_segue() -> None:
    """`pip install segue[...]` would take an index's package of this name where the one of .venv is not seen."""
    lines = make("nightly").replace("\\\n", " ").splitlines()
    installs = [line for line in lines if "nightly/bin/python install" in line]
    assert installs
    assert not any("segue" in line.lower() for line in installs)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, unpacked; and a wheel built from that without a compiler, unpacked."""
    home = tmp_path_factory.mktemp("built")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and ("/" not in name or name.startswith("src/")):
            (home / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, home / "tree" / name)
    python = [sys.executable, "-c"]
    subprocess.run([*python, BUILD, str(home)], cwd=home / "tree", check=True, capture_output=True)
    with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
        archive.extractall(home / "sdist", filter="data")
    [source] = (home / "sdist").iterdir()
    without = {**os.environ, "CC": "/bin/false"}
    subprocess.run([*python, WHEEL, str(home)], cwd=source, check=True, capture_output=True, env=without)
    with zipfile.ZipFile(next(home.glob("*.whl"))) as archive:
        archive.extractall(home / "wheel")
    return source, home / "wheel"


def test_nothing_is_left_out(built: tuple[Path, Path]) -> None:
    """Code, headers, data and the page are in the source distribution; all but what is compiled, in the wheel."""
    source, wheel = built
    tree = source.parents[1] / "tree"
    files = {path.relative_to(tree) for path in (tree / "src" / "segue").rglob("*") if path.is_file()}
    assert {path.suffix for path in files} >= {".py", ".c", ".h", ".html", ".txt", ".jinja"}
    assert [path for path in files if not (source / path).is_file()] == []
    installed = [path for path in files if path.suffix not in (".c", ".h")]
    assert [path for path in installed if not (wheel / path.relative_to("src")).is_file()] == []
    assert (source / "constraints.txt").is_file()
    assert not list(wheel.rglob("*.so"))


def test_a_start_without_compiled_kernels_says_so_once(built: tuple[Path, Path], toy_dir: Path) -> None:
    """That wheel serves; one line says what is missing and what to install."""
    command = [sys.executable, "-m", "segue.cli", "generate", str(toy_dir), "hello", "--max-tokens", "4"]
    paths = os.pathsep.join([str(built[1]), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=built[1], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    [said] = [line for line in done.stderr.splitlines() if "compiled kernels" in line]
    assert "gcc" in said
    assert "pip install --force-reinstall" in said
