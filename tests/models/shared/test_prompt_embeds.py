"""Files of prompt embeddings: what is read, and what is refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from segue.messages.errors import InvalidRequest, TooLarge
from segue.models.shared.text.prompt_embeds import identity_of, read_embeds

WIDTH, LONGEST, MOST = 8, 6, 1 << 16
ROWS = torch.arange(24.0).reshape(3, WIDTH)


def torch_file(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def safe_file(**tensors: torch.Tensor) -> bytes:
    return safetensors.torch.save(tensors)


def read(data: bytes) -> torch.Tensor:
    return read_embeds(data, WIDTH, LONGEST, MOST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_read(dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)
    for data in (torch_file(rows), torch_file(rows[None]), safe_file(prompt=rows)):
        found = read(data)
        assert found.dtype == dtype
        assert torch.equal(found, rows)


class Harmful:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "made"
    for data in (torch_file(Harmful(path)), pickle.dumps(Harmful(path))):
        with pytest.raises(InvalidRequest):
            read(data)
    assert not path.exists()


def packed() -> bytes:
    """An archive of torch's whose files are compressed."""
    made = io.BytesIO()
    old = zipfile.ZipFile(io.BytesIO(torch_file(torch.zeros(4, 4096))))
    with old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return made.getvalue()


WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "sparse": (lambda: torch_file(ROWS.to_sparse()), "must be dense"),
    "whole numbers": (lambda: torch_file(ROWS.long()), "must be of float32"),
    "too narrow": (lambda: safe_file(a=ROWS[:, :4].contiguous()), r"must have \[tokens, 8\]"),
    "no rows": (lambda: safe_file(a=ROWS[:0]), r"must have \[tokens, 8\]"),
    "too long": (lambda: safe_file(a=torch.zeros(LONGEST, WIDTH)), "it may have 5"),
    "NaN": (lambda: safe_file(a=ROWS * float("nan")), "NaN"),
    "two": (lambda: safe_file(a=ROWS, b=ROWS.clone()), "must hold one"),
    "a dict": (lambda: torch_file({"a": ROWS}), "holds a dict"),
    "cut off": (lambda: torch_file(ROWS)[:-40], "cannot be read"),
    "no file": (lambda: b"hello", "neither a file"),
    "packed": (packed, "compressed archive"),
    "one row for all": (lambda: torch_file(torch.zeros(1).expand(5, WIDTH)), "larger than its file|^$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    make, text = WRONG[name]
    data = make()
    if name == "one row for all":  # the file itself has a head of a kilobyte
        with pytest.raises(InvalidRequest, match="larger than its file"):
            read_embeds(torch_file(torch.zeros(1).expand(4096, WIDTH)), WIDTH, 1 << 20, MOST)
        return
    with pytest.raises(InvalidRequest, match=text) as caught:
        read(data)
    assert caught.value.field == "prompt_embeds"


def test_a_file_has_an_end() -> None:
    with pytest.raises(TooLarge, match="at most 64 are taken"):
        read_embeds(safe_file(a=ROWS), WIDTH, LONGEST, 64)


def test_equal_rows_are_equal() -> None:
    assert identity_of(ROWS) == identity_of(ROWS.to(torch.bfloat16))
    assert len(set(identity_of(ROWS))) == len(ROWS)
    assert identity_of(ROWS)[:2] == identity_of(ROWS[:2])
