"""Run by `test_server_serve.py` as a process of its own: serves the fake, and says so when it has cleaned up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from fake_service import FakeService, finished

from segue.messages.deltas import Delta, TextDelta
from segue.messages.request import Request
from segue.server.serve import serve
from segue.server.settings import ServerSettings


async def until_told(request: Request) -> AsyncGenerator[Delta]:
    """Ends when a line comes on stdin."""
    yield TextDelta("thinker", "begun")
    await asyncio.to_thread(sys.stdin.readline)
    yield TextDelta("thinker", " and ended")
    yield finished()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def main() -> None:
    settings = ServerSettings(port=0, drain_seconds=240)
    try:
        await serve(FakeService(until_told), settings, on_listening=say)
    finally:
        say("stages stopped")


asyncio.run(main())
