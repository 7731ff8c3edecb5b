"""Builds a chat completion's objects, whole or in chunks.

`ReplyReader` splits one choice's text into content, reasoning and tool calls as it comes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from segue.messages.deltas import Delta, EncodedDelta, Finished, ModelDelta, TextDelta, TokenLogprobs
from segue.models.shared.dialects.pieces import CallArguments, CallBegun, ReplyPiece, Said, Thought
from segue.server.generation.usage import metrics_object
from segue.server.openai.chat.request import ChatRequest, logprobs_object


class ReplyReader:
    """Parses the text of one choice."""

    def __init__(self, chat: ChatRequest) -> None:
        self._parser = chat.tools.parser(chat.dialect, opened=chat.in_thought)()
        self._parallel = chat.tools.parallel
        self._thoughts = chat.include_reasoning
        self.called = False
        """Whether the reply calls a tool."""
        self.thought_tokens = 0
        self._unread = 0
        """Tokens whose text is held back."""

    def feed(self, text: str, tokens: int) -> list[ReplyPiece]:
        """Parse the text of `tokens` tokens."""
        self._unread += tokens
        return self._counted(self._parser.feed(text))

    def finish(self) -> list[ReplyPiece]:
        """Return the text that was held back."""
        return self._counted(self._parser.finish())

    def finish_reason(self, finished: Finished) -> str:
        """The finish reason; `tool_calls` if the model ended its reply after a call."""
        return "tool_calls" if self.called and finished.finish_reason == "stop" else finished.finish_reason

    def _counted(self, pieces: Sequence[ReplyPiece]) -> list[ReplyPiece]:
        if pieces:
            self.thought_tokens += self._unread if isinstance(pieces[-1], Thought) else 0
            self._unread = 0
        return self._wanted(pieces)

    def _wanted(self, pieces: Sequence[ReplyPiece]) -> list[ReplyPiece]:
        wanted: list[ReplyPiece] = []
        for piece in pieces:
            if isinstance(piece, Thought) and not self._thoughts:
                continue
            if isinstance(piece, CallBegun | CallArguments):
                self.called = True
                if piece.index and not self._parallel:
                    continue
            wanted.append(piece)
        return wanted


def delta_of(piece: ReplyPiece, chat: ChatRequest) -> dict[str, Any]:
    """The `delta` of a streamed choice for one piece."""
    match piece:
        case Said(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegun(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id(chat), "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_fields(pieces: Sequence[ReplyPiece], chat: ChatRequest) -> dict[str, Any]:
    """The fields of a whole message; content is None if there are calls, or had to be, and no text."""
    said = "".join(piece.text for piece in pieces if isinstance(piece, Said))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": call_id(chat), "type": "function", "function": function})
        elif isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    fields: dict[str, Any] = {"content": said if said or not (calls or chat.tools.structured) else None}
    if thought:
        fields |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        fields["tool_calls"] = calls
    return fields


def call_id(chat: ChatRequest) -> str:
    """A new id, in the form that the model's template accepts."""
    return chat.dialect.new_call_id()


_NOTHING_OF_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
"""Keys that OpenAI's and vLLM's messages always have; null if unused."""


def image_object(delta: EncodedDelta) -> dict[str, Any]:
    """An image, in base64, as an `image_url` part with a data URL."""
    return {"type": "image_url", "image_url": {"url": f"data:{delta.mime};base64,{delta.data.decode()}"}}


def ending(finished: Finished, chat: ChatRequest) -> dict[str, Any]:
    """The fields at the end of a choice: the finish reason and requested additions."""
    stopped_by = next((choice.stop_reason for choice in finished.choices), None)
    fields: dict[str, Any] = {"finish_reason": finished.finish_reason, "stop_reason": stopped_by}
    own: dict[str, Any] = {}
    if chat.return_token_ids and len(finished.token_ids) > 1:
        own["token_ids"] = finished.token_ids
    if chat.return_metrics:
        own |= metrics_object(finished)
    return {**fields, "segue": own} if own else fields


def audio_id() -> str:
    """A new id for one choice's audio."""
    return f"audio-{uuid.uuid4().hex}"


def expiry() -> int:
    """`expires_at` of audio: now, because the server does not store it."""
    return int(time.time())


class WholeChoice:
    """Collects one choice of an answer that is not streamed."""

    def __init__(self, index: int, chat: ChatRequest) -> None:
        self.index = index
        self._chat = chat
        self._reader = ReplyReader(chat)
        self._pieces: list[ReplyPiece] = []
        self._end: Finished | None = None
        self._logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """If requested; equal in all choices."""
        self.prompt_token_ids: list[int] = []
        self._token_ids: list[int] = []
        self._audio: list[bytes] = []
        """The pieces of the audio file, in base64."""
        self._rate: float | None = None
        self._images: list[EncodedDelta] = []
        self._texts: dict[str, str] = {}
        """What the client requested by the name of a model of a graph of models."""

    def take(self, delta: Delta) -> None:
        """Add a delta."""
        if isinstance(delta, TextDelta):
            self._pieces += self._reader.feed(delta.text, len(delta.token_ids))
            self._token_ids += delta.token_ids
            self._logprobs += delta.logprobs
            self.prompt_logprobs += delta.prompt_logprobs
            self.prompt_token_ids += delta.prompt_token_ids
        elif isinstance(delta, EncodedDelta) and delta.kind == "image":
            self._images.append(delta)
        elif isinstance(delta, EncodedDelta):
            self._audio.append(delta.data)
            self._rate = delta.facts["sample_rate"]
        elif isinstance(delta, ModelDelta):
            if isinstance(delta.delta, TextDelta):
                self._texts[delta.model] = self._texts.get(delta.model, "") + delta.delta.text
        elif isinstance(delta, Finished):
            self._pieces += self._reader.finish()
            self._end = delta

    @property
    def end(self) -> Finished:
        """The last delta, once all deltas were taken."""
        assert self._end is not None
        return self._end

    @property
    def thought_tokens(self) -> int:
        """Thought tokens in the text so far."""
        return self._reader.thought_tokens

    def build(self) -> dict[str, Any]:
        """Build the choice object."""
        chat = self._chat
        fields = message_fields(self._pieces, chat)
        text = fields["content"] or ""
        message: dict[str, Any] = {"role": "assistant", "content": None, **_NOTHING_OF_MESSAGE}
        if chat.wants_text:
            message |= fields
        if chat.wants_audio:
            message["audio"] = {
                "id": audio_id(),
                "data": b"".join(self._audio).decode(),
                "expires_at": expiry(),
                "transcript": text,
                "format": chat.audio_format,
                "sample_rate": self._rate,
            }
        if self._texts:
            message["models"] = {name: {"text": text} for name, text in self._texts.items()}
        if self._images:
            message["images"] = images = [image_object(image) for image in self._images]
            if not chat.wants_text:  # vllm-omni's clients read images here
                message["content"] = images
        logprobs = logprobs_object(self._logprobs, as_ids=chat.tokens_as_ids) if chat.wants_logprobs else None
        end = {**ending(self.end, chat), "finish_reason": self._reader.finish_reason(self.end)}
        ids = self._token_ids if chat.return_token_ids else None
        return {"index": self.index, "message": message, "logprobs": logprobs, **end, "token_ids": ids}
