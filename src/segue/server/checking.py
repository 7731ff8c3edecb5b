"""Threads on which requests are checked, and on nothing else: media are read there, and a host that answers slowly must
not keep waiting what else is done on threads (codecs, files, large bodies)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

THREADS = 32
"""So many requests may wait for hosts at one time."""
P = ParamSpec("P")
T = TypeVar("T")


class Checking:
    """The threads of one application."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="segue-request")

    async def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `check` gives, or its error."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(check, *args, **kwargs))
