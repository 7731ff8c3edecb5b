"""The websocket `/v1/audio/speech/stream`: texts that a client appends to are said while they are written."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.websockets import WebSocket

from segue.messages.errors import InvalidRequest, SegueError, TooLarge, wrong
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.orchestrator.spoken.passages import MOST_SENTENCES, Passage, in_turn
from segue.orchestrator.spoken.sentences import Sentences
from segue.orchestrator.spoken.words import Words
from segue.server.http.checking import Checking
from segue.server.http.websocket import Frame, SessionTimeout, Socket, client_message, error_message
from segue.server.openai.audio.arriving_text import MOST_STREAMED
from segue.server.openai.audio.speech import encoded, said
from segue.server.openai.audio.speech_messages import FROM_CLIENT, SessionConfig, session_config, start_message
from segue.server.openai.audio.speech_request import MOST_CHARACTERS
from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import calling


@dataclass
class _Text:
    """A text, from its first `input.text` to its `input.done`."""

    index: int
    config: SessionConfig
    begun: float
    """Unix time."""
    last: float
    """By when it must be complete, in the event loop's time."""
    characters: int = 0
    sentences: int = 0
    splitter: Sentences = field(default_factory=Sentences)
    words: Words = field(default_factory=Words)
    """Splits it, if it goes on."""
    passage: _Unit | None = None
    """The last one of a text that goes on; more may be appended."""
    whole: str = ""
    """What has arrived, if it is said whole."""


@dataclass
class _Unit:
    """A sentence to say, a passage that goes on, or the end of a text."""

    text: _Text
    index: int
    """Of the sentence or passage in its text; of the end, their number."""
    sentence: Passage | None
    size: int = 0
    """Characters that have arrived."""
    over: bool = False
    """Its last message has been sent."""


class SpeechSession:
    """One websocket. One task reads messages, so that a client that leaves is noticed at once; another says what they
    give, and waits for the client to take it."""

    def __init__(
        self, socket: WebSocket, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
    ) -> None:
        self._socket = Socket(socket, settings.stall_seconds)
        self._service = service
        self._settings = settings
        self._metrics = metrics
        self._checking = checking
        self._config: SessionConfig | None = None
        self._text: _Text | None = None
        """The text that is not complete."""
        self._texts = 0
        self._units: asyncio.Queue[_Unit | None] = asyncio.Queue()
        """Units that are not begun; None: there are no more."""
        self._given: deque[_Unit] = deque()
        """Units whose last message has not been sent: those of `_units`, and those that are being said."""
        self._waiting = 0
        """Their characters."""
        self._closing = False
        """Whether the client has sent `session.close`."""
        self._last_message = self._said = asyncio.get_running_loop().time()
        """When the last message came, and when a unit was last sent whole, in the event loop's time."""

    async def run(self) -> None:
        """Serve the client until it leaves or an error ends the session; the reason is then the last message."""
        await self._socket.serve(self._read(), self._say())

    async def _read(self) -> None:
        """Take the client's messages until it leaves. Raises the error that ends the session."""
        while (message := await self._receive()) is not None:
            self._last_message = asyncio.get_running_loop().time()
            if self._closing:
                continue
            try:
                await self._take(*client_message(message.get("text"), FROM_CLIENT, self._settings.limits))
            except InvalidRequest as error:
                if self._config is None or isinstance(error, TooLarge):
                    raise
                await self._socket.send(error_message(error))
        if self._given or self._text is not None:
            self._socket.client_gone()

    async def _receive(self) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(self._patience()):
                    return await self._socket.receive()
            except TimeoutError:
                # while nothing came, the last audio may have been sent: then the client's time began
                if loop.time() >= self._patience():
                    raise self._too_late(loop.time()) from None

    def _patience(self) -> float:
        """Until when the next message must come, in the event loop's time."""
        stall = self._settings.stall_seconds
        if self._text is not None:
            return min(self._text.last, self._last_message + stall)
        if self._given:
            return asyncio.get_running_loop().time() + stall
        return max(self._last_message, self._said) + stall

    def _too_late(self, now: float) -> SessionTimeout:
        stall = self._settings.stall_seconds
        if self._text is None:
            return SessionTimeout(f"no message arrived for {stall:g} seconds (stall_seconds)")
        if now >= self._text.last:
            whole = self._settings.upload_seconds
            return SessionTimeout(f"the text was not complete within {whole:g} seconds (upload_seconds)")
        return SessionTimeout(f"no more text arrived for {stall:g} seconds (stall_seconds); send input.done")

    async def _take(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "session.config":
            if self._text is not None:
                raise InvalidRequest("session.config came within a text; send input.done first", field="type")
            self._config = await self._checking.run(session_config, values, self._service.card, self._settings)
            self._last_message = asyncio.get_running_loop().time()  # a recording may have been fetched
        elif kind == "session.close":
            if self._text is not None:
                self._end_passage(self._text)
            self._closing, self._text = True, None
            self._units.put_nowait(None)
        elif self._config is None:
            raise wrong("type", kind, "session.config in the first message")
        elif kind == "input.text":
            if not isinstance(piece := values.get("text"), str):
                raise wrong("text", piece, "a string")
            if piece:
                self._append(piece, self._open(self._config))
        else:
            self._end(self._open(self._config))

    def _open(self, config: SessionConfig) -> _Text:
        """The text that is not complete, or a new one."""
        if self._text is None:
            if self._texts:  # the first one was counted with the handshake
                calling.get().account.count()
            last = asyncio.get_running_loop().time() + self._settings.upload_seconds
            self._text = _Text(self._texts, config, time.time(), last)
            self._texts += 1
        return self._text

    def _append(self, piece: str, text: _Text) -> None:
        text.characters += len(piece)
        most = MOST_STREAMED if text.config.split else MOST_CHARACTERS
        if text.characters > most:
            raise TooLarge(f"the text has more than {most} characters; send input.done before", field="text")
        if text.config.goes_on:
            self._go_on(text, text.words.feed(piece))
        elif text.config.split:
            for sentence in text.splitter.feed(piece):
                self._give(text, sentence.strip())
        else:
            text.whole += piece

    def _end(self, text: _Text) -> None:
        if text.config.goes_on:
            self._go_on(text, [*text.words.finish(), None])
        else:
            for sentence in text.splitter.finish() if text.config.split else [text.whole]:
                self._give(text, sentence.strip())
        self._text = None
        self._put(_Unit(text, text.sentences, None))

    def _go_on(self, text: _Text, pieces: list[str | None]) -> None:
        """Append pieces to the passage, or begin another."""
        for piece in pieces:
            if piece is None:
                self._end_passage(text)
            elif text.passage is None:
                text.passage = self._begun(text, piece.lstrip())
            elif (passage := text.passage.sentence) is not None and not text.passage.over:
                passage.put(piece)
                text.passage.size += len(piece)
                self._count(len(piece))

    def _end_passage(self, text: _Text) -> None:
        if text.passage is not None and text.passage.sentence is not None:
            text.passage.sentence.put(None)
        text.passage = None

    def _give(self, text: _Text, sentence: str) -> None:
        if (unit := self._begun(text, sentence)) is not None and unit.sentence is not None:
            unit.sentence.put(None)

    def _begun(self, text: _Text, words: str) -> _Unit | None:
        """A new sentence or passage; None if there is nothing to say."""
        if not any(character.isalnum() for character in words):
            return None
        if text.sentences >= MOST_SENTENCES:
            raise TooLarge(f"the text has more than {MOST_SENTENCES} sentences; send input.done before", field="text")
        passage = Passage()
        passage.put(words)
        unit = _Unit(text, text.sentences, passage, len(words))
        text.sentences += 1
        self._put(unit)
        return unit

    def _put(self, unit: _Unit) -> None:
        self._count(unit.size)
        self._given.append(unit)
        self._units.put_nowait(unit)

    def _count(self, characters: int) -> None:
        self._waiting += characters
        if self._waiting > MOST_STREAMED or len(self._given) > MOST_SENTENCES:
            raise TooLarge(
                f"more than {MOST_STREAMED} characters or {MOST_SENTENCES} sentences wait to be spoken; "
                "send more once they have been spoken",
                field="text",
            )

    async def _say(self) -> None:
        """Send the messages of all units, in their order; then close."""
        async with aclosing(in_turn(self._unit_stream(), self._frames)) as frames:
            async for frame in frames:
                await self._socket.send(frame)
                if isinstance(frame, dict) and frame["type"] in ("audio.done", "session.done"):
                    unit = self._given.popleft()
                    unit.over = True
                    self._waiting -= unit.size
                    self._said = asyncio.get_running_loop().time()
        await self._socket.close()

    async def _unit_stream(self) -> AsyncGenerator[_Unit]:
        while (unit := await self._units.get()) is not None:
            yield unit

    async def _frames(self, unit: _Unit) -> AsyncGenerator[Frame]:
        """The messages of one unit. A sentence that fails has an `error`, and the next one is said."""
        text = unit.text
        if unit.sentence is None:
            yield {"type": "session.done", "utterance_index": text.index, "total_sentences": unit.index}
            return
        where = {"utterance_index": text.index, "sentence_index": unit.index}
        size, failed = 0, False
        held: list[bytes] = []
        rest = unit.sentence.pieces()
        first = await anext(rest)
        yield start_message(where, first, text.config)
        request = text.config.request(first, text.begun)
        try:
            deltas = said(request, self._service, self._metrics, rest if text.config.goes_on else None)
            async with aclosing(rest), aclosing(encoded(deltas)) as pieces:
                async for piece, _ in pieces:
                    size += len(piece)
                    if not text.config.stream_audio:
                        held.append(piece)
                    elif piece:
                        yield piece
            if held:
                yield b"".join(held)
        except SegueError as error:
            failed = True
            if not text.config.stream_audio:
                size = 0
            yield {**error_message(error), **where}
        yield {"type": "audio.done", **where, "total_bytes": size, "error": failed}


def add_speech_stream(
    app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
) -> None:
    """Add the endpoint."""

    @app.websocket("/v1/audio/speech/stream")
    async def speak_stream(socket: WebSocket) -> None:
        await SpeechSession(socket, service, settings, metrics, checking).run()
