"""Where a checkpoint is: a directory, or a name of Hugging Face's hub whose files are in its cache. Nothing is
downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from segue.messages.errors import ConfigError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""OWNER/MODEL."""
_CACHED = "models--"
"""Folders of the cache are called so, with OWNER--MODEL behind it."""


def located(model: str | Path) -> tuple[Path, str]:
    """(directory, what clients call the model unless it is said): a directory by its last name as it was written, what
    is in the cache by OWNER/MODEL. Raises `ConfigError`."""
    written = Path(model).expanduser()
    path = Path(os.path.abspath(written))  # a link keeps its own name
    if path.is_dir():
        if path.name.startswith(_CACHED) and (path / "snapshots").is_dir():
            name = _name_of(path)
            return _cached(name, path.parent), name
        cached = path.parent.name == "snapshots" and path.parents[1].name.startswith(_CACHED)
        return path.resolve(), _name_of(path.parents[1]) if cached else path.name
    if path.exists():
        raise ConfigError(f"{str(model)!r} is a file; a checkpoint is a directory", field="model")
    if _NAME.fullmatch(str(model)):
        return _cached(str(model), None), str(model)
    raise ConfigError(f"no checkpoint at {str(model)!r}: that is not a directory", field="model")


def _name_of(folder: Path) -> str:
    return folder.name.removeprefix(_CACHED).replace("--", "/", 1)


def _cached(name: str, cache: Path | None) -> Path:
    """The files of a model in the cache. `cache`: None: where the hub's own programs have it (`HF_HUB_CACHE`,
    `HF_HOME`)."""
    from huggingface_hub import constants, snapshot_download  # takes time, and few need it
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        partly = getattr(error, "snapshot_path", None)
        if partly is not None:  # what is missing may be of no use here; else it is named when it is read
            return Path(partly)
        raise ConfigError(
            f"no checkpoint at {name!r}: that is not a directory, and no model of that name is in the cache of Hugging "
            f"Face's hub ({cache or constants.HF_HUB_CACHE}); 'hf download {name}' would get one",
            field="model",
        ) from error
