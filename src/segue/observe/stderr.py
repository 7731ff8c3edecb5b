"""Write to standard error without failing: it may be a file on a full disk, which must not stop the program."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Write and flush `text`; drop it on an `OSError`."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
