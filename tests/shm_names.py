"""Files that a program leaves behind in /dev/shm."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_FOLDER = "/dev/shm/"


def abandoned() -> set[str]:
    """Names there that no process has open or mapped: what others on the machine work with meanwhile does not count."""
    names = set(os.listdir(_FOLDER))
    for process in Path("/proc").iterdir() if names else ():
        if process.name.isdigit():
            names -= _used_by(process)
    return names


def _used_by(process: Path) -> set[str]:
    used: list[str] = []
    with suppress(OSError):  # it has ended, or is somebody else's
        used += (process / "maps").read_text().splitlines()
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):  # it was closed
                used.append(os.readlink(descriptor))
    return {line.partition(_FOLDER)[2] for line in used}
