"""A GPU machine without a C compiler: what needs one says so, or something else is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from segue.kernels.attention.backends.choose import attention_backend
from segue.kernels.graphs.compiled import lacks_for_triton
from segue.messages.errors import ConfigError

GPU = torch.device("cuda:0")


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "gcc"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_what_is_missing(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "Python.h").touch()
    there = {"PATH": str(tmp_path)}
    assert lacks_for_triton(there, tmp_path) is None
    assert lacks_for_triton({**there, "CC": str(compiler)}, tmp_path) is None
    assert lacks_for_triton({**there, "CC": "icc"}, tmp_path) == "the C compiler that CC names, 'icc'"
    assert (
        lacks_for_triton(there, tmp_path / "nowhere") == "Python's headers (Python.h, of python3-dev or python3-devel)"
    )
    assert lacks_for_triton({"PATH": "/nowhere"}, tmp_path) == "a C compiler (gcc or clang)"


def test_torch_takes_the_place_of_triton_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    assert attention_backend("auto", GPU, 16, {"PATH": "/nowhere"}) is None
    assert "attention runs on torch, which is slower than triton: a C compiler (gcc or clang) is missing" in caplog.text


@pytest.mark.parametrize("name", ["triton", "flex"])
def test_what_was_asked_for_by_name_is_refused(name: str) -> None:
    pytest.importorskip("triton")
    with pytest.raises(
        ConfigError, match=rf"attention is '{name}', .* a C compiler \(gcc or clang\) is missing; install"
    ):
        attention_backend(name, GPU, 128, {"PATH": "/nowhere"})
