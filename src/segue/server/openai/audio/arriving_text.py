"""A request's body that is a text, said while it arrives: by sentences, or as it goes on."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from segue.messages.errors import InvalidRequest, SegueError, TooLarge, shown, wrong
from segue.server.http.body import check_uncompressed
from segue.server.http.errors import UnsupportedMediaType, UploadTimeout
from segue.server.http.multipart import FormPart, form_values
from segue.server.openai.audio.sentences import Sentences
from segue.server.openai.audio.speech_request import SpeechOptions
from segue.server.openai.audio.words import Words
from segue.server.settings import ServerSettings

MOST_STREAMED = 1 << 16
"""Characters of one text."""
MOST_SENTENCES = 1024
"""Sentences of one text; each is a generation."""
AT_ONCE = 2
"""Sentences that are made at a time: the one that is sent, and the next."""
_AHEAD = 64
"""Pieces of the next sentence that may wait for their turn."""
T = TypeVar("T")
D = TypeVar("D")


def is_text(request: HttpRequest) -> bool:
    """Whether the body is the text itself."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/plain"


def query_values(request: HttpRequest) -> dict[str, Any]:
    """The parameters of the query, as a JSON body has them. Raises `InvalidRequest`."""
    pairs = request.query_params.multi_items()
    parts = [FormPart(name, value.encode(errors="replace"), is_file=False) for name, value in pairs]
    return form_values(parts, SpeechOptions, frozenset())


class Passage:
    """A text that is said by one generation, perhaps before all of it has arrived."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[str | SegueError | None] = asyncio.Queue()
        """Pieces that are not yet taken; None: there are no more."""

    def put(self, piece: str | SegueError | None) -> None:
        self._arrived.put_nowait(piece)

    async def pieces(self) -> AsyncGenerator[str]:
        """Yield what has arrived, as soon as there is something. Raises the `SegueError` that ends the text."""
        rest: str | SegueError | None = ""
        while rest is not None:
            text, rest = "", await self._arrived.get()
            while isinstance(rest, str):
                text += rest
                if self._arrived.empty():
                    break
                rest = self._arrived.get_nowait()
            if text:
                yield text
            if isinstance(rest, SegueError):
                raise rest


class ArrivingText:
    """The text of a body, from its first bytes to its last."""

    def __init__(self, request: HttpRequest, settings: ServerSettings, *, goes_on: bool) -> None:
        """`goes_on`: passages may be begun before they have arrived; else each is a whole sentence. Raises
        `UnsupportedMediaType` if the body is compressed or not UTF-8."""
        check_uncompressed(request)
        charset = request.headers["content-type"].lower().partition("charset=")[2].partition(";")[0].strip(' "')
        if charset not in ("", "utf-8", "utf8", "us-ascii"):
            raise UnsupportedMediaType(f"charset of Content-Type is {shown(charset)}; the text must be utf-8")
        self._settings = settings
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._splitter: Sentences | Words = Words() if goes_on else Sentences()
        self._passage: Passage | None = None
        """The one of which more may arrive."""
        self._characters = self._count = 0
        self._complete = False
        self._arrived: asyncio.Queue[Passage | SegueError | None] = asyncio.Queue()
        """Passages that are not yet begun; `MOST_STREAMED` bounds them. None: the text is over."""

    async def passages(self) -> AsyncGenerator[Passage]:
        """Yield each passage when it begins to arrive. Raises `SegueError` if the rest of the body is not a text within
        limits, or does not arrive in time."""
        while (passage := await self._arrived.get()) is not None:
            if isinstance(passage, SegueError):
                raise passage
            yield passage

    def while_read(self, answer: Response) -> Response:
        """An answer that reads the body while it is sent."""
        return _WhileRead(self, answer)

    def reading(self, receive: Receive) -> Receive:
        """`receive`, which also takes the text out of the messages. After an error it does not return any more: the
        answer ends with that error."""
        loop = asyncio.get_running_loop()
        stall, whole = self._settings.stall_seconds, self._settings.upload_seconds
        last = loop.time() + whole

        async def read() -> Message:
            if self._complete:
                return await receive()
            error: SegueError
            try:
                async with asyncio.timeout_at(min(last, loop.time() + stall)):
                    message = await receive()
                self._take(message)
                return message
            except TimeoutError:
                error = UploadTimeout("body", whole) if loop.time() >= last else TextStalled(stall)
            except SegueError as found:
                error = found
            while not self._arrived.empty():  # what is not begun is not said any more
                self._arrived.get_nowait()
            if self._passage is not None:
                self._passage.put(error)
            self._arrived.put_nowait(error)
            return await loop.create_future()

        return read

    def _take(self, message: Message) -> None:
        if message["type"] != "http.request":
            return
        self._complete = not message.get("more_body", False)
        try:
            text = self._decoder.decode(message.get("body", b""), self._complete)
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not UTF-8 text: {error}", field="input") from error
        self._characters += len(text)
        if self._characters > MOST_STREAMED:
            raise TooLarge(f"the text has more than {MOST_STREAMED} characters; send it in several requests")
        self._put(self._splitter.feed(text))
        if self._complete:
            self._put(self._splitter.finish())
            self._end()
            if not self._count:
                raise wrong("input", text, "the text to say, at least one word")
            self._arrived.put_nowait(None)

    def _put(self, pieces: Sequence[str | None]) -> None:
        for piece in pieces:
            if piece is None:
                self._end()
            elif isinstance(self._splitter, Words):
                self._append(piece)
            else:
                self._append(piece.strip())
                self._end()

    def _append(self, piece: str) -> None:
        """Add a piece to the passage, or begin another, unless it has nothing to say."""
        if self._passage is None:
            if not any(character.isalnum() for character in piece):
                return
            self._count += 1
            if self._count > MOST_SENTENCES:
                raise TooLarge(f"the text has more than {MOST_SENTENCES} sentences; send it in several requests")
            self._passage, piece = Passage(), piece.lstrip()
            self._arrived.put_nowait(self._passage)
        self._passage.put(piece)

    def _end(self) -> None:
        if self._passage is not None:
            self._passage.put(None)
            self._passage = None


class TextStalled(UploadTimeout):
    """The client sent a part of its text, and no more."""

    def __init__(self, seconds: float) -> None:
        SegueError.__init__(self, f"no more text arrived for {seconds:g} seconds (stall_seconds); end the body")


class _WhileRead(Response):
    def __init__(self, text: ArrivingText, answer: Response) -> None:
        super().__init__()
        self._text, self._answer = text, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, self._text.reading(receive), send)


async def in_turn(texts: AsyncGenerator[T], said: Callable[[T], AsyncGenerator[D]]) -> AsyncGenerator[D]:
    """Yield what `said` makes of the texts (deltas, or encoded pieces), one text after the other.

    The next text is begun while the pieces of one are taken, at most `AT_ONCE` together. An error of a text, or of
    `texts`, is raised in its turn. Closing this generator closes those of all texts.
    """
    slots = asyncio.Semaphore(AT_ONCE)
    begun: asyncio.Queue[_Ahead[D] | Exception | None] = asyncio.Queue()
    running: deque[_Ahead[D]] = deque()

    async def begin() -> None:
        try:
            async with aclosing(texts):
                async for text in texts:
                    await slots.acquire()
                    running.append(_Ahead(said(text)))
                    begun.put_nowait(running[-1])
        except Exception as error:  # the consumer raises it
            begun.put_nowait(error)
        else:
            begun.put_nowait(None)

    beginning = asyncio.create_task(begin())
    try:
        while (ahead := await begun.get()) is not None:
            if isinstance(ahead, Exception):
                raise ahead
            while (piece := await ahead.arrived.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
            running.popleft()
            slots.release()
    finally:
        tasks = [beginning, *(one.task for one in running)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Ahead(Generic[D]):
    """The pieces of one text, made before their turn."""

    def __init__(self, pieces: AsyncGenerator[D]) -> None:
        self.arrived: asyncio.Queue[D | Exception | None] = asyncio.Queue(_AHEAD)
        """None: there are no more."""
        self.task = asyncio.create_task(self._make(pieces))

    async def _make(self, pieces: AsyncGenerator[D]) -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    await self.arrived.put(piece)
        except Exception as error:  # the consumer raises it
            await self.arrived.put(error)
        else:
            await self.arrived.put(None)
