"""The versions that pyproject.toml allows fit together on a new machine: the pinned, the lowest and the newest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNREACHED = 2
"""uv's status for all that is no answer; that versions do not fit is 1."""


@pytest.mark.needs("uv")
@pytest.mark.parametrize("python", ["3.11", "3.14"])
@pytest.mark.parametrize(
    "versions",
    [
        pytest.param(["-c", "constraints.txt", "--extra", "nightly"], id="pinned"),
        pytest.param(["--resolution", "lowest-direct"], id="lowest"),
        # any release of any package may break it, whatever the commit
        pytest.param(["--resolution", "highest"], id="newest", marks=pytest.mark.named),
    ],
)
def test_versions_fit_together(versions: list[str], python: str) -> None:
    uv = [sys.executable, "-m", "uv", "--no-config", "--native-tls"]
    command = [*uv, "pip", "compile", "--quiet", "--no-header", "--extra", "dev"]
    for_whom = ["--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu"]
    # conftest.py leads tests to no certificates, for none of the others speaks TLS
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_DIR"}
    done = subprocess.run(
        [*command, *for_whom, *versions, "pyproject.toml"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == UNREACHED:
        pytest.skip(f"the index of packages was not reached: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "torch==" in done.stdout
