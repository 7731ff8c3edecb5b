"""The version of Segue that runs, which the hosts of one system share."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of_segue() -> str:
    """Return the installed version; "source" if the source is not installed."""
    try:
        return version("segue")
    except PackageNotFoundError:
        return "source"
