"""Write a checkpoint into a directory, replacing only files that Segue wrote itself.

The record `.segue-tiny.json` in such a directory has the SHA-256 of every file written there. A file that is not in the
record, or has changed since, is the user's: the directory is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from segue.messages.errors import ConfigError

_RECORD = ".segue-tiny.json"
_UNFINISHED = ".segue-tiny-"
"""Prefix of temporary directories of unfinished checkpoints."""


@contextmanager
def filled(directory: Path) -> Iterator[Path]:
    """A temporary directory to write a checkpoint into. If the block ends without an error, its files move into
    `directory` and replace those of an earlier call; until then `directory` stays unchanged.

    Raises `ConfigError`, before anything is written, if `directory` holds any other file.
    """
    _own_files(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{_UNFINISHED}*/"):  # left by a process that was killed
        shutil.rmtree(left)
    # inside `directory`, so that moving its files never crosses a mount point
    with TemporaryDirectory(prefix=_UNFINISHED, dir=directory) as scratch:
        new = Path(scratch)
        yield new
        files = sorted(path.relative_to(new) for path in new.rglob("*") if path.is_file())
        record = {str(name): _digest(new / name) for name in files}
        old = _own_files(directory)
        # if killed at any point here, every file left is in the record
        for name in old:
            (directory / name).unlink()
        for folder in sorted({parent for name in old for parent in name.parents[:-1]}, reverse=True):
            if not any((directory / folder).iterdir()):
                (directory / folder).rmdir()
        (new / _RECORD).write_text(json.dumps({"files": record}, indent=1) + "\n")
        for name in (Path(_RECORD), *files):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).replace(directory / name)


def _own_files(directory: Path) -> list[Path]:
    """The files of an earlier call, relative to `directory`. Raises `ConfigError` if there are others."""
    record, own = _record(directory), []
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if Path(folder) != directory or not name.startswith(_UNFINISHED)]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for path in (Path(folder) / name for name in (*files, *links)):
            name = path.relative_to(directory)
            if name == Path(_RECORD):
                continue
            if path.is_symlink() or not path.is_file() or record.get(str(name)) != _digest(path):
                raise ConfigError(
                    f"{str(directory)!r} holds {str(name)!r}, which `segue tiny` did not write, or which has changed "
                    "since: nothing was written; name another directory, or remove this one",
                    field="directory",
                )
            own.append(name)
    return own


def _record(directory: Path) -> dict[str, str]:
    """SHA-256 by file name; empty without a readable record."""
    try:
        files: dict[str, str] = json.loads((directory / _RECORD).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return files


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
