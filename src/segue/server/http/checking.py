"""Threads that only check requests with media.

Checking fetches media, and a slow host must not delay other work on threads (codecs, files, large bodies, requests
without media).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

THREADS = 32
"""Most requests that may wait for hosts at a time."""
P = ParamSpec("P")
T = TypeVar("T")


class Checking:
    """The checking threads of one application."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="segue-request")

    async def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `check` on a thread and return its result, or raise its error. It runs in the caller's context, like
        `asyncio.to_thread`."""
        inside = partial(copy_context().run, check, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, inside)
