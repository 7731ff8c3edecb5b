"""What is said on standard error, and that a full disk there ends nothing."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from segue.observe.stderr import say, say_error


def failure() -> ValueError:
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        return error


def test_it_is_said() -> None:
    with redirect_stderr(io.StringIO()) as said:
        say("ready\n")
        say_error(failure())
    first, second, *_, last = said.getvalue().splitlines()
    assert (first, second, last) == ("ready", "Traceback (most recent call last):", "ValueError: no such thing")


def test_a_full_disk() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 its closing fails
    with redirect_stderr(full):
        say("ready\n")
        say_error(failure())
    with pytest.raises(OSError, match="No space left"):
        full.close()
