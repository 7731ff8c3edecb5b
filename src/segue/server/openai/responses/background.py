"""Makes responses in the background, with or without a connected client, until they end or are cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.messages.deltas import Finished
from segue.messages.errors import InvalidRequest, Overloaded, SegueError, ShuttingDown, shown
from segue.messages.request import MediaPart
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import run_generations
from segue.server.http.events import event_bytes
from segue.server.openai.responses.journal import Journal
from segue.server.openai.responses.request import ResponsesRequest
from segue.server.openai.responses.store import ResponseStore, Turn
from segue.server.openai.responses.writer import Event, ResponseWriter
from segue.server.tenants.tenants import caller, calling

AT_ONCE = 32
"""Most responses in the stages at a time; others wait in order, which leaves capacity for interactive clients."""

_log = logging.getLogger("segue.server")


@dataclass(frozen=True)
class _Running:
    writer: ResponseWriter
    journal: Journal
    task: asyncio.Task[None]


class BackgroundResponses:
    """The background responses of a store. Runs on the event loop of the service."""

    def __init__(self, service: Service, store: ResponseStore, metrics: ServerMetrics) -> None:
        self._service = service
        self._store = store
        self._metrics = metrics
        self._room = asyncio.Semaphore(AT_ONCE)
        self._running: dict[str, _Running] = {}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run until the server stops. Unfinished responses then fail, because they are only in memory."""
        try:
            yield
        finally:
            left = list(self._running)
            if left:
                _log.warning("%d responses in the background end with the server: %s", len(left), ", ".join(left))
            for response_id in left:
                await self._end(response_id, ShuttingDown("the server is shutting down"))

    def submit(self, asked: ResponsesRequest, before: Turn | None) -> tuple[dict[str, Any], Journal]:
        """(the response in its first state, its events). Raises `TooLarge`, or `Overloaded` if it cannot be stored."""
        writer = ResponseWriter(asked)
        events = _encoded(writer.queue())
        queued = writer.response
        journal = self._store.begin(queued, asked.items, before, events, _media_bytes(asked), caller())
        call = calling.get()
        call.hold()
        task = asyncio.create_task(self._run(asked, writer))
        task.add_done_callback(lambda _: call.release())
        self._running[asked.response_id] = _Running(writer, journal, task)
        task.add_done_callback(lambda _: self._running.pop(asked.response_id, None))
        return queued, journal

    async def cancel(self, response_id: str) -> bytes:
        """Cancel a response and return it. An ended response does not change. Raises `NotFound`, and `InvalidRequest`
        if it was not made in the background."""
        kept = self._store.response(response_id)
        if not self._store.of_background(response_id):
            raise InvalidRequest(
                f"response {shown(response_id)} was not made in the background, and has ended: to cancel one that "
                "runs, close its connection",
                field="response_id",
            )
        return await self._end(response_id) or kept

    async def delete(self, response_id: str) -> None:
        """Cancel a response if it is running, and delete it. Raises `NotFound`."""
        if await self._end(response_id) is None or response_id in self._store:  # it may be dropped at its end
            self._store.forget(response_id)

    async def _end(self, response_id: str, why: SegueError | None = None) -> bytes | None:
        """End a response, as cancelled or failed, and return its JSON; None if it had ended before."""
        if (one := self._running.get(response_id)) is None:
            return None
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        if not one.journal.ended:
            last = one.writer.cancel() if why is None else one.writer.fail(why)
            self._store.end(one.writer.response, _encoded(last))
        return msgspec.json.encode(one.writer.response)

    async def _run(self, asked: ResponsesRequest, writer: ResponseWriter) -> None:
        try:
            async with self._room:
                last = await self._make(asked, writer)
        except SegueError as error:
            last = writer.fail(error)
        except Exception:
            # clients that wait get an answer whatever the error is, and its text stays in the log
            _log.exception("a bug in the server")
            last = writer.fail(SegueError(f"internal error; the server's log has it: {asked.response_id}"))
        self._store.end(writer.response, _encoded(last))

    async def _make(self, asked: ResponsesRequest, writer: ResponseWriter) -> list[Event]:
        """Make the response and return its last events."""
        while True:
            await self._service.room()
            try:
                return await self._write(asked, writer)
            except Overloaded:  # another request took the place
                continue

    async def _write(self, asked: ResponsesRequest, writer: ResponseWriter) -> list[Event]:
        events: list[Event] = []
        async with aclosing(
            run_generations(self._service, asked.chat.requests, self._metrics, asked.chat.written, timed=False)
        ) as deltas:
            begun = False
            async for _, delta in deltas:
                stood = writer.response
                events = [*([] if begun else writer.leave_queue()), *writer.take(delta)]
                begun = True
                if not isinstance(delta, Finished):
                    changed = writer.response if writer.response is not stood else None
                    self._store.add(asked.response_id, _encoded(events), changed)
        return events


def _encoded(events: list[Event]) -> list[bytes]:
    return [event_bytes(event, event["type"]) for event in events]


def _media_bytes(asked: ResponsesRequest) -> int:
    """Size of the stages' input besides the text."""
    parts = [part for request in asked.chat.requests for message in request.messages for part in message.content]
    return sum(len(part.data if isinstance(part, MediaPart) else part.embeds or b"") for part in parts)
