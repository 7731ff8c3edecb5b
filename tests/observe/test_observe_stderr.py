"""What is said on standard error, and that a full disk there ends nothing."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from segue.observe.stderr import say


def test_it_is_said() -> None:
    with redirect_stderr(io.StringIO()) as said:
        say("ready\n")
    assert said.getvalue() == "ready\n"


def test_a_full_disk() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 its closing fails
    with redirect_stderr(full):
        say("ready\n")
    with pytest.raises(OSError, match="No space left"):
        full.close()
