"""The websocket `/v1/chat/completions/stream`: a completion whose input is appended while it runs.

From the client: `session.config`, `input.append`, `input.done`. To the client: the chunks of a streamed completion, and
`error`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from starlette.websockets import WebSocket

from segue.media.parts import appended_parts
from segue.messages.deltas import Delta, TurnEnded
from segue.messages.errors import InvalidRequest, TooLarge, wrong
from segue.messages.limits import check_carried
from segue.messages.request import Appended, MediaPart, Part, Request
from segue.messages.tensors import check_tensors
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import ModelCard, Service
from segue.server.generation.generations import run_generations
from segue.server.http.body import check_names
from segue.server.http.checking import Checking
from segue.server.http.websocket import SessionTimeout, Socket, client_message, error_message
from segue.server.openai.chat.request import ChatRequest, chat_request
from segue.server.openai.chat.stream import chat_chunks
from segue.server.settings import ServerSettings

FROM_CLIENT = ("session.config", "input.append", "input.done")
"""Values of a client's `type`."""


class ChatSession:
    """One websocket with one completion. One task reads messages, so that a client that leaves is noticed at once;
    another sends the chunks."""

    def __init__(
        self, socket: WebSocket, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
    ) -> None:
        self._socket = Socket(socket, settings.stall_seconds)
        self._service = service
        self._settings = settings
        self._metrics = metrics
        self._checking = checking
        self._asked: asyncio.Future[ChatRequest] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[Appended | None] = asyncio.Queue()
        """What is appended; None: no more."""
        self._items: dict[str, int] = {}
        """Tensor → items so far."""
        self._owed = 0
        """Replies that the model has not ended, at most: a model without text does not tell when one has."""
        self._complete = False
        """Whether the client has sent `input.done`."""
        self._active = asyncio.get_running_loop().time()
        """When the last message came, or the last turn ended, in the event loop's time."""

    async def run(self) -> None:
        """Serve the client until it leaves, the completion has ended, or an error ends it; the reason is then the last
        message."""
        await self._socket.serve(self._read(), self._answer())

    async def _read(self) -> None:
        """Take the client's messages until it leaves. Raises the error that ends the session."""
        while (message := await self._receive()) is not None:
            self._active = asyncio.get_running_loop().time()
            try:
                await self._take(*client_message(message.get("text"), FROM_CLIENT, self._settings.limits))
            except InvalidRequest as error:
                if not self._asked.done() or isinstance(error, TooLarge):
                    raise
                await self._socket.send(error_message(error))
        self._socket.client_gone()

    async def _receive(self) -> dict[str, Any] | None:
        loop, stall = asyncio.get_running_loop(), self._settings.stall_seconds
        receiving = asyncio.ensure_future(self._socket.receive())
        try:
            while not receiving.done():
                waits = not self._complete and not self._owed
                if waits and loop.time() >= self._active + stall:
                    raise SessionTimeout(f"no message arrived for {stall:g} seconds (stall_seconds)")
                left = self._active + stall - loop.time() if waits else stall
                await asyncio.wait([receiving], timeout=left)
            return receiving.result()
        finally:
            receiving.cancel()

    async def _take(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "session.config":
            if self._asked.done():
                raise InvalidRequest("session.config came a second time; open another websocket", field="type")
            chat = await self._checking.run(_completion, values, self._service.card, self._settings)
            self._active = asyncio.get_running_loop().time()  # media may have been fetched
            self._count(chat.requests[0].tensors())
            self._asked.set_result(chat)
        elif not self._asked.done():
            raise wrong("type", kind, "session.config in the first message")
        elif self._complete:
            raise InvalidRequest(f"{kind} came after input.done", field="type")
        elif kind == "input.append":
            pieces = _pieces(values, self._settings)
            self._count([part for piece in pieces for part in piece.tensors])  # all or nothing is appended
            for piece in pieces:
                self._owed += piece.reply and not piece.tensors
                self._pieces.put_nowait(piece)
        else:
            check_names(values, ())
            self._complete = True
            self._pieces.put_nowait(None)

    def _count(self, tensors: list[MediaPart]) -> None:
        """Check tensors, and count their items. Raises `InvalidRequest`."""
        before = sum(self._items.values())
        check_tensors(tensors, self._service.card.tensors, self._items)
        self._owed += sum(self._items.values()) - before

    async def _answer(self) -> None:
        """Send the chunks of the completion; then close."""
        chat = await self._asked
        deltas = run_generations(self._service, chat.requests, self._metrics, chat.written, stream=self._stream)
        async with aclosing(chat_chunks(chat, deltas, self._service.card.text_stage)) as chunks:
            async for chunk in chunks:
                await self._socket.send(chunk)
        await self._socket.close()

    async def _stream(self, request: Request) -> AsyncGenerator[Delta]:
        async with aclosing(self._service.stream_appended(request, self._appended())) as deltas:
            async for delta in deltas:
                if isinstance(delta, TurnEnded):
                    self._owed = max(0, self._owed - 1)
                    self._active = asyncio.get_running_loop().time()
                yield delta

    async def _appended(self) -> AsyncGenerator[Appended]:
        while (piece := await self._pieces.get()) is not None:
            yield piece


def _completion(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> ChatRequest:
    """Convert a `session.config`, without its `type`. Blocking (media). Raises `InvalidRequest`."""
    if values.get("stream") not in (None, True):
        raise wrong("stream", values["stream"], "left out: the chunks are always sent as they are made")
    chat = chat_request({**values, "stream": True}, card, settings)
    if chat.choices > 1:
        raise wrong("n", chat.choices, "1 if input is appended")
    if not card.appends:
        raise InvalidRequest(
            f"{card.name} takes its whole input at once: use POST /v1/chat/completions", field="session.config"
        )
    return chat


def _pieces(values: dict[str, Any], settings: ServerSettings) -> list[Appended]:
    """Convert an `input.append`, without its `type`. Raises `InvalidRequest`."""
    check_names(values, ("content", "reply"))
    reply = values.get("reply", False)
    if not isinstance(reply, bool):
        raise wrong("reply", reply, "true or false")
    *rest, last = appended_parts(values.get("content"), settings.media, "content")
    return [*(_piece(part, reply=False) for part in rest), _piece(last, reply=reply)]


def _piece(part: Part, *, reply: bool) -> Appended:
    if isinstance(part, MediaPart):
        return Appended(tensors=[part], reply=reply)
    check_carried(part.text, "content")
    return Appended(prompt=part.text, reply=reply)


def add_chat_stream(
    app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
) -> None:
    """Add the endpoint."""

    @app.websocket("/v1/chat/completions/stream")
    async def stream(socket: WebSocket) -> None:
        await ChatSession(socket, service, settings, metrics, checking).run()
