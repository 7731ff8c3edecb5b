"""Take a payload as a worker does: fetch, and fetch again when woken."""

import threading
import time
from collections.abc import Callable
from typing import Any

from segue.connectors.base import Arrived, Coming, Connector

KEY = bytes(range(32))
"""Of the connectors between hosts."""
WAIT = 30.0
"""Seconds in which a transfer must end."""


def take(
    connector: Connector, from_stage: str, to_stage: str, request_id: str, metadata: dict[str, Any] | None
) -> tuple[dict[str, Any], int] | None:
    """Return (payload, bytes), or None if it is gone."""
    woken = threading.Event()
    while True:
        found = connector.fetch(from_stage, to_stage, request_id, metadata, woken.set)
        if not isinstance(found, Coming):
            return (found.payload, found.nbytes) if isinstance(found, Arrived) else None
        assert woken.wait(WAIT), "no wake for a payload on its way"
        woken.clear()


def until(holds: Callable[[], bool]) -> None:
    """Return when something holds that another thread or process brings about, and announces to nobody."""
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end, "it never came about"
        threading.Event().wait(0.001)
