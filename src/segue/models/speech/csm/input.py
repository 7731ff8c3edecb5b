"""The input stage of CSM: a conversation → text ids, and its recordings as samples. `stages` documents the payload.

As the published chat template writes it, a prompt has per turn `<|begin_of_text|>[speaker]text<|end_of_text|>`, then
the turn's recording, if it has one: `<|AUDIO|><|audio_eos|>`. The ids are built turn by turn, so that no text becomes
a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from segue.engines.contract import LoadContext, Payload
from segue.engines.module.contract import Result, Work
from segue.graph.parts import TOKENS
from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.models.shared.decoder.generation import context_length
from segue.models.shared.input_stage import InputStage
from segue.models.shared.speech.recordings import recording_item
from segue.models.shared.text.placeholders import check_counts
from segue.models.shared.text.prompt import (
    check_length,
    check_text,
    checked_ids,
    client_tokens,
    given_as,
    own_tokens_only,
    tokenized,
    truncated,
)
from segue.models.shared.text.tokenizer import tokenizer_for
from segue.models.speech.csm.family import speaker
from segue.models.speech.csm.loading import load_config

_STAGE = "backbone"
_SPOKEN = ("user", "assistant")
"""Roles whose messages are spoken by the request's voice, if they have no name."""


class InputProcessor(InputStage):
    """Accepts messages, or a bare prompt (`[0]Hello`) or text ids along with recordings, a placeholder for each.

    Options: `limits`, a dict of `MediaLimits` fields.
    """

    alone = True

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        self._vocab: int = config.text_vocab_size
        self._longest = context_length(config, ctx.max_model_len)
        self._rate: int = config.codec_config.sampling_rate
        self._audio = [config.audio_token_id, config.audio_eos_token_id]
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._limits.budget
        self._tokenizer: Any = tokenizer_for(ctx)
        if self._tokenizer is not None and None in self._ends():
            raise ConfigError(
                f"{ctx.model_dir}: the tokenizer has no bos_token or no eos_token, which enclose each text",
                field="model",
            )

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        return super().run(works)

    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values, and
        `NotFound` for an unknown voice."""
        voice = speaker(request.voice)
        media: list[Payload] = []
        form = given_as(request, media=True)
        match form:
            case "messages":
                ids, media = self._conversation(request, voice)
            case "prompt":
                ids = tokenized(self._tokenizer, request, self._longest, _STAGE)
            case _:
                ids = checked_ids(request.prompt_token_ids or [], self._vocab)
        if form != "messages" and not (own_tokens_only(request) and not request.messages):
            parts = request.media()
            self._limits.check_items(len(parts), form)
            check_counts({"audio": ids.count(self._audio[0])}, {"audio": len(parts)}, form)
            media = [self._recording(part) for part in parts]
        ids = truncated(ids, request, _STAGE, self._longest, media=bool(media))
        if not own_tokens_only(request):
            check_length(len(ids), self._longest, form)
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {"token_ids": torch.tensor(ids, dtype=torch.long), "media": media, **seen}

    def _conversation(self, request: Request, voice: str) -> tuple[list[int], list[Payload]]:
        """(ids, recordings in order) of a conversation."""
        if self._tokenizer is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer; send prompt_token_ids in place of messages", field="messages"
            )
        messages = _with_voice(request)
        parts = [_parts(message, number) for number, message in enumerate(messages)]
        *before, (_, trailing) = parts
        if trailing:
            raise InvalidRequest(
                f"messages[{len(before)}] has a recording; the last message is the text to say", field="messages"
            )
        for number, (_, recordings) in enumerate(before):
            if len(recordings) != 1:
                raise InvalidRequest(
                    f"messages[{number}] has {len(recordings)} recordings; each message before the last has its text "
                    "and one recording of it",
                    field="messages",
                )
        self._limits.check_items(len(before), "messages")
        ids: list[int] = []
        media: list[Payload] = []
        for number, (text, recordings) in enumerate(parts):
            ids += self._turn(request, f"[{speaker_of(messages[number], number, voice)}]{text}")
            for part in recordings:
                ids += self._audio
                media.append(self._recording(part))
        return ids, media

    def _turn(self, request: Request, text: str) -> list[int]:
        check_text(text, self._tokenizer, request, self._longest, _STAGE, "messages")
        begin, end = self._ends()
        written = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [begin, *written, end]

    def _ends(self) -> Sequence[Any]:
        return self._tokenizer.bos_token_id, self._tokenizer.eos_token_id

    def _recording(self, part: MediaPart) -> Payload:
        samples = np.ascontiguousarray(decode_audio(part, self._rate, self._limits))
        return recording_item(samples)


def _with_voice(request: Request) -> list[Message]:
    """The messages; a recording of the voice to speak with, and its words in the option `ref_text`, become a message
    before the text. Raises `InvalidRequest`."""
    *before, last = request.messages
    words = request.options.get("ref_text")
    voice = [part for part in last.content if isinstance(part, MediaPart) and part.role == "voice"]
    if not voice and words is None:
        return request.messages
    if not voice or not isinstance(words, str):
        raise InvalidRequest(
            "a recording of a voice and ref_text, the words that it says, belong together; give both, or neither",
            field="ref_text",
        )
    text = [part for part in last.content if part not in voice]
    return [*before, Message(last.role, [*voice, TextPart(words)], last.extra), Message(last.role, text, last.extra)]


def _parts(message: Message, number: int) -> tuple[str, list[MediaPart]]:
    """(text, recordings) of a message. Raises `InvalidRequest`."""
    texts: list[str] = []
    recordings: list[MediaPart] = []
    for index, part in enumerate(message.content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif part.kind == "audio":
            recordings.append(part)
        else:
            field = part.field or f"messages[{number}].content[{index}]"
            raise InvalidRequest(f"{field} is {part.kind}; this model takes text and audio", field=field)
    text = "\n".join(texts)
    if not text.strip():
        raise InvalidRequest(f"messages[{number}] has no text", field=f"messages[{number}].content")
    return text, recordings


def speaker_of(message: Message, number: int, voice: str) -> str:
    """The speaker id of message `number`: its `name`, or its role if that is one; else the request's voice. Raises
    `InvalidRequest`."""
    name = message.extra.get("name")
    if name is None and message.role in _SPOKEN:
        return voice
    field, given = ("role", message.role) if name is None else ("name", name)
    if not (isinstance(given, str) and given.isascii() and given.isdigit()):
        field = f"messages[{number}].{field}"
        raise InvalidRequest(
            f"{field} is {given!r}; a speaker is a number such as '0'; messages of the {' or the '.join(_SPOKEN)} "
            "without a name are spoken by the request's voice",
            field=field,
        )
    return given
