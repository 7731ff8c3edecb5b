"""The version of Segue that runs, which the hosts of one system share.

Optional reading: compared once, when a host joins.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

OTHER_MESSAGES = (
    "server and node run different commits of this version of Segue, whose messages differ; install the same on both"
)
"""Why a peer with the same version and another `wire_version` is refused."""


def version_of_segue() -> str:
    """Return the installed version; "source" if the source is not installed."""
    try:
        return version("segue")
    except PackageNotFoundError:
        return "source"
