"""A request's body that is a text, said while it arrives: by sentences, or as it goes on."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from segue.messages.errors import InvalidRequest, SegueError, TooLarge, shown, wrong
from segue.orchestrator.spoken.passages import Passage, Passages
from segue.server.http.body import check_uncompressed
from segue.server.http.errors import UnsupportedMediaType, UploadTimeout
from segue.server.http.multipart import FormPart, form_values
from segue.server.openai.audio.speech_request import SpeechOptions
from segue.server.settings import ServerSettings

MOST_STREAMED = 1 << 16
"""Characters of one text."""


def is_text(request: HttpRequest) -> bool:
    """Whether the body is the text itself."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/plain"


def query_values(request: HttpRequest) -> dict[str, Any]:
    """The parameters of the query, as a JSON body has them. Raises `InvalidRequest`."""
    pairs = request.query_params.multi_items()
    parts = [FormPart(name, value.encode(errors="replace"), is_file=False) for name, value in pairs]
    return form_values(parts, SpeechOptions, frozenset())


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
        self._passages = Passages(goes_on=goes_on)
        self._characters = 0
        self._complete = False

    def passages(self) -> AsyncGenerator[Passage]:
        """Yield each passage when it begins to arrive. Raises `SegueError` if the rest of the body is not a text within
        limits, or does not arrive in time."""
        return self._passages.begun()

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
            self._passages.fail(error)
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
        self._passages.feed(text)
        if self._complete and not self._passages.finish():
            raise wrong("input", text, "the text to say, at least one word")


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
