"""Standard error, which may be a file on a full disk: what cannot be written there ends nothing."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Write at once, or not at all."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
