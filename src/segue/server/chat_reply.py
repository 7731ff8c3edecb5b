"""What a chat completion is made of, whole or in chunks: OpenAI's objects."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any

import numpy as np

from segue.media.encode import encode_audio, encode_png
from segue.messages.deltas import AudioDelta, Delta, Finished, ImageDelta, TextDelta, TokenLogprobs
from segue.models.dialects.pieces import Piece
from segue.server.accounts import metrics_object
from segue.server.chat_logprobs import logprobs_object
from segue.server.chat_request import ChatRequest
from segue.server.reply_reader import ReplyReader, message_fields

_SILENCE_RATE = 24_000
"""Rate of an audio reply that turned out to have no samples, so that it is still a file."""


def image_object(delta: ImageDelta) -> dict[str, Any]:
    """A picture as an `image_url` part with a PNG data URL."""
    png = base64.b64encode(encode_png(delta.data, delta.height, delta.width)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}


def ending(finished: Finished, chat: ChatRequest) -> dict[str, Any]:
    """What the end of a choice adds to it: the finish reason, and what was asked for of ours."""
    stopped_by = next((choice.stop_reason for choice in finished.choices), None)
    fields: dict[str, Any] = {"finish_reason": finished.finish_reason, "stop_reason": stopped_by}
    own: dict[str, Any] = {}
    if chat.return_token_ids and len(finished.token_ids) > 1:
        own["token_ids"] = finished.token_ids
    if chat.return_metrics:
        own |= metrics_object(finished)
    return {**fields, "segue": own} if own else fields


def audio_id() -> str:
    """A fresh name for one choice's audio."""
    return f"audio-{uuid.uuid4().hex}"


def expiry() -> int:
    """`expires_at`: audio is not kept here, so its id is good for nothing from now on."""
    return int(time.time())


class WholeChoice:
    """Gathers one choice of an answer that is not streamed."""

    def __init__(self, index: int, chat: ChatRequest) -> None:
        self.index = index
        self._chat = chat
        self._reader = ReplyReader(chat)
        self._pieces: list[Piece] = []
        self._end: Finished | None = None
        self._logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """Where asked for; every choice has the same."""
        self.prompt_token_ids: list[int] = []
        self._token_ids: list[int] = []
        self._samples: list[bytes] = []
        self._rate = _SILENCE_RATE
        self._images: list[ImageDelta] = []

    def take(self, delta: Delta) -> None:
        """Add what came."""
        if isinstance(delta, TextDelta):
            self._pieces += self._reader.feed(delta.text, len(delta.token_ids))
            self._token_ids += delta.token_ids
            self._logprobs += delta.logprobs
            self.prompt_logprobs += delta.prompt_logprobs
            self.prompt_token_ids += delta.prompt_token_ids
        elif isinstance(delta, AudioDelta):
            self._samples.append(delta.samples)
            self._rate = delta.sample_rate
        elif isinstance(delta, ImageDelta):
            if delta.partial is None:
                self._images.append(delta)
        elif isinstance(delta, Finished):
            self._pieces += self._reader.finish()
            self._end = delta

    @property
    def end(self) -> Finished:
        """The last delta; there once all of them were taken."""
        assert self._end is not None
        return self._end

    @property
    def thought_tokens(self) -> int:
        """Of the text so far."""
        return self._reader.thought_tokens

    def build(self) -> dict[str, Any]:
        """The choice object. Encodes media: call it off the event loop."""
        chat = self._chat
        fields = message_fields(self._pieces, chat)
        text = fields["content"] or ""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        if chat.wants_text:
            message |= fields
        if chat.wants_audio:
            samples = np.frombuffer(b"".join(self._samples), dtype="<f4")
            data = encode_audio(samples, self._rate, chat.audio_format)
            message["audio"] = {
                "id": audio_id(),
                "data": base64.b64encode(data).decode(),
                "expires_at": expiry(),
                "transcript": text,
                "format": chat.audio_format,
                "sample_rate": self._rate,
            }
        if self._images:
            message["images"] = [image_object(image) for image in self._images]
        logprobs = logprobs_object(self._logprobs, as_ids=chat.tokens_as_ids) if chat.wants_logprobs else None
        end = {**ending(self.end, chat), "finish_reason": self._reader.finish_reason(self.end)}
        ids = {"token_ids": self._token_ids} if chat.return_token_ids else {}
        return {"index": self.index, "message": message, "logprobs": logprobs, **end, **ids}
