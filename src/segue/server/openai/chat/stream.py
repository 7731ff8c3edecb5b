"""Streams a chat completion as server-sent events, with text and audio interleaved as they are made."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from segue.messages.deltas import ChoiceEnded, Delta, EncodedDelta, Finished, ModelDelta, TextDelta, TurnEnded
from segue.models.shared.dialects.pieces import ReplyPiece, Said
from segue.server.generation.generations import early_end, of_choices
from segue.server.generation.usage import RunningUsage, usage_object
from segue.server.openai.chat.reply import ReplyReader, audio_id, delta_of, ending, expiry, image_object
from segue.server.openai.chat.request import ChatRequest, logprobs_object


class _StreamedChoice:
    """Builds the delta objects of one choice."""

    def __init__(self, index: int, chat: ChatRequest) -> None:
        self.index = index
        self._chat = chat
        self._audible = False
        self._audio_id = audio_id()
        self._begun = False
        self._ended = False
        self._reader = ReplyReader(chat)

    def opening(self) -> list[dict[str, Any]]:
        """The first entry, with the role and no token; later calls return nothing."""
        if self._begun:
            return []
        self._begun = True
        return [self._entry({"role": "assistant", "content": "" if self._chat.wants_text else None})]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The entries of `choices` for one delta."""
        if isinstance(delta, ChoiceEnded) and not self._chat.return_metrics:  # metrics come only at the very end
            delta = early_end(delta)
        if self._ended:
            return []
        entries = []
        if isinstance(delta, TextDelta):
            new = self._read(self._reader.feed(delta.text, len(delta.token_ids)))
            if of_tokens := self._of_tokens(delta):
                # the text may be held back while its token ids or log-probabilities are there
                new = new or [self._entry(self._text(""))]
                new[0] |= of_tokens
            entries += new
        elif isinstance(delta, EncodedDelta) and delta.kind == "image":
            entries.append(self._entry({"images": [image_object(delta)]}))
        elif isinstance(delta, EncodedDelta) and delta.kind == "video":
            if delta.data:
                video = {"data": delta.data.decode(), "format": "mp4", **delta.facts}
                entries.append(self._entry({"video": video}))
        elif isinstance(delta, EncodedDelta):
            self._audible = True
            if delta.data:
                entries.append(self._entry({"audio": self._audio(delta)}))
        elif isinstance(delta, ModelDelta):
            if isinstance(delta.delta, TextDelta):
                entries.append(self._entry({"models": {delta.model: {"text": delta.delta.text}}}))
        elif isinstance(delta, TurnEnded):
            entries += self._read(self._reader.finish())
            self._reader = ReplyReader(replace(self._chat, in_thought=False))
            ended = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            entries.append({**self._entry({}), "turn_ended": ended})
        elif isinstance(delta, Finished):
            self._ended = True
            entries += self._read(self._reader.finish())
            if self._audible:
                entries.append(self._entry({"audio": {"id": self._audio_id, "expires_at": expiry()}}))
            end = {**ending(delta, self._chat), "finish_reason": self._reader.finish_reason(delta)}
            entries.append({**self._entry({}), **end})
        return entries

    @property
    def thought_tokens(self) -> int:
        """Thought tokens in the text so far."""
        return self._reader.thought_tokens

    def _of_tokens(self, delta: TextDelta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.logprobs and self._chat.wants_logprobs:
            fields["logprobs"] = logprobs_object(delta.logprobs, as_ids=self._chat.tokens_as_ids)
        if delta.token_ids and self._chat.return_token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def _read(self, pieces: list[ReplyPiece]) -> list[dict[str, Any]]:
        """The entries for parsed pieces. If the client wants no text, only a transcript is sent."""
        entries = []
        for piece in pieces:
            if isinstance(piece, Said):
                entries.append(self._entry(self._text(piece.text)))
            elif self._chat.wants_text:
                entries.append(self._entry(delta_of(piece, self._chat)))
        return entries

    def _text(self, text: str) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if self._chat.wants_text else {}
        if self._chat.wants_audio:
            delta["audio"] = {"id": self._audio_id, "transcript": text}
        return delta

    def _audio(self, delta: EncodedDelta) -> dict[str, Any]:
        return {
            "id": self._audio_id,
            "data": delta.data.decode(),
            "format": self._chat.audio_format,
            "sample_rate": delta.facts["sample_rate"],
        }

    def _entry(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}


async def chat_chunks(
    chat: ChatRequest, deltas: AsyncGenerator[tuple[int, Delta]], text_stage: str | None
) -> AsyncGenerator[dict[str, object]]:
    """Yield the chunks of a streamed completion; the usage, if requested, comes last.

    `deltas`: (index of the request, delta). `text_stage`: whose outputs are the choices, if one request has several.
    """
    head: dict[str, Any] = {
        "id": chat.completion_id,
        "object": "chat.completion.chunk",
        "created": chat.created,
        "model": chat.model,
    }
    running = RunningUsage(chat)
    choices = [_StreamedChoice(index, chat) for index in range(chat.choices)]
    finished: list[Finished] = []
    async with aclosing(deltas):
        async for index, whole in deltas:
            for place, delta in of_choices(index, whole, text_stage):
                if isinstance(delta, Finished):
                    finished.append(delta)
                running.take_prompt(delta)
                prompt = _prompt_ids(chat, delta)
                for entry in choices[place].opening():
                    yield {**head, "choices": [entry], "prompt_token_ids": None, **prompt, **running.fields()}
                    prompt = {}
                running.take(delta)
                for entry in choices[place].chunks(delta):
                    yield {**head, "choices": [entry], **prompt, **running.fields()}
                    prompt = {}
    if chat.include_usage:
        thoughts = sum(choice.thought_tokens for choice in choices)
        yield {**head, "choices": [], "usage": usage_object(finished, thought_tokens=thoughts)}


def _prompt_ids(chat: ChatRequest, delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta) and delta.prompt_token_ids and chat.return_token_ids:
        return {"prompt_token_ids": delta.prompt_token_ids}
    return {}
