"""The input stage: a conversation, or a text to say → text ids, and recordings as samples. `stages` documents the
payload; `prompt` has the forms of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from segue.engines.contract import LoadContext, Payload
from segue.engines.module.contract import Result, Work
from segue.graph.parts import TOKENS
from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.errors import InvalidRequest, NotFound, wrong
from segue.messages.request import MediaPart, Message, Part, Request, TextPart
from segue.messages.units import Unit, ids_of, rows_of
from segue.models.shared.input_stage import InputStage
from segue.models.shared.speech.recordings import recording_item
from segue.models.shared.text.going_on import requests_of
from segue.models.shared.text.prompt import (
    check_length,
    check_text,
    checked_ids,
    client_tokens,
    given_as,
    own_tokens_only,
    truncated,
)
from segue.models.speech.mimo_audio.config import Codec, Config, frames_of, read_codec, read_config
from segue.models.speech.mimo_audio.prompt import Script
from segue.models.speech.mimo_audio.tokens import EMPTY, SPOKEN, id_of, tokenizer_of

_STAGE = "llm"
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class _Asked:
    """The options of a request."""

    spoken: bool
    """The reply is speech."""
    how: str
    thinking: bool
    few_shot: bool


class InputProcessor(InputStage):
    """Accepts messages, a bare prompt (a text to say, or to go on with) or text ids.

    A single user's text, with speech wanted, is said; a conversation with recordings is replied to. Options of a
    request: `instructions` (how to say a text), `thinking`, `few_shot`. Options of the stage: `limits`, a dict of
    `MediaLimits` fields.
    """

    goes_on = True
    alone = True

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint, or one without a tokenizer."""
        self._config: Config = read_config(ctx.model_dir)
        self._codec: Codec = read_codec(ctx.model_dir, self._config)
        self._tokenizer: Any = tokenizer_of(ctx.model_dir, self._config)
        longest = self._config.max_position_embeddings
        self._longest = min(ctx.max_model_len or longest, longest)
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._limits.budget

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        return super().run(works)

    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values, and
        `NotFound` for a voice."""
        if request.voice is not None:
            raise NotFound(
                f"voice is {request.voice!r}; this model has no voices: give a recording of one in a system message",
                field="voice",
            )
        script, form = Script(self._tokenizer, self._recording), given_as(request)
        replies: list[Payload] = []
        for number, one in enumerate(requests_of(request)):
            if number:
                replies += self._said(script, request.earlier[number - 1].units)
            self._own(script, one, follows=bool(number))
            media = bool(script.media or replies)
            script.ids = truncated(script.ids, one, _STAGE, self._longest, media=media)
        if not script.ids and not own_tokens_only(request):
            raise InvalidRequest(f"{form} is empty; give at least one token", field=form)
        if not own_tokens_only(request):
            check_length(len(script.ids), self._longest, form)
        self._limits.check_items(len(script.media), "messages")
        seen = client_tokens(script.ids, self._tokenizer) if TOKENS in request.modalities else {}
        ids = torch.tensor(script.ids, dtype=torch.long)
        return {"token_ids": ids, "media": script.media, "replies": replies, **seen}

    def _own(self, script: Script, request: Request, *, follows: bool) -> None:
        """Write what a request says itself; `follows`: a reply is before it."""
        asked, form = _asked(request), given_as(request)
        match form:
            case "messages":
                self._check_texts(request)
                (_follow if follows else _write)(script, request.messages, asked)
            case "prompt":
                text = request.prompt or ""
                check_text(text, self._tokenizer, request, self._longest, _STAGE, form)
                if not asked.spoken:
                    script.text(text)
                elif follows:
                    _follow(script, [Message("user", [TextPart(text)])], asked)
                else:
                    _say(script, text, asked, None, form)
            case _:
                ids = checked_ids(request.prompt_token_ids or [], self._config.vocab_size)
                if id_of(self._tokenizer, EMPTY) in ids:
                    raise InvalidRequest(f"{form} has {EMPTY}, the place of a recording", field=form)
                script.ids += ids

    def _said(self, script: Script, units: list[Unit]) -> list[Payload]:
        """Write a reply as it was generated. Returns its patches, and how many recordings are before them."""
        empty = id_of(self._tokenizer, EMPTY)
        codes = [row[1:] for row in rows_of(units) if row[0] == empty]
        script.ids += ids_of(units)
        return [{"after": len(script.media), "codes": torch.tensor(codes, dtype=torch.long)}] if codes else []

    def _check_texts(self, request: Request) -> None:
        for number, message in enumerate(request.messages):
            if message.role not in _ROLES:
                raise wrong(f"messages[{number}].role", message.role, f"one of {', '.join(_ROLES)}")
            for index, part in enumerate(message.content):
                field = f"messages[{number}].content[{index}]"
                if isinstance(part, TextPart):
                    check_text(part.text, self._tokenizer, request, self._longest, _STAGE, field)
                elif part.kind != "audio":
                    field = part.field or field
                    raise InvalidRequest(f"{field} is {part.kind}; this model takes text and audio", field=field)
        self._limits.check_items(sum(len(_recordings(message)) for message in request.messages), "messages")

    def _recording(self, part: MediaPart) -> tuple[Payload, int]:
        """(media item, number of patches)."""
        samples = np.ascontiguousarray(decode_audio(part, self._codec.sampling_rate, self._limits))
        if len(samples) < self._codec.shortest:
            field = part.field or "messages"
            raise InvalidRequest(
                f"{field} is a recording of {len(samples)} samples at {self._codec.sampling_rate} Hz; it must have at "
                f"least {self._codec.shortest}",
                field=field,
            )
        patches = -(-frames_of(len(samples), self._codec) // self._config.group_size)
        return recording_item(samples), patches


def _asked(request: Request) -> _Asked:
    """Raises `InvalidRequest`."""
    options = request.options
    for name in ("thinking", "few_shot"):
        if not isinstance(options.get(name, False), bool):
            raise wrong(f"options.{name}", options[name], "true or false")
    how = options.get("instructions") or ""
    if not isinstance(how, str):
        raise wrong("options.instructions", how, "a text")
    return _Asked("audio" in request.modalities, how, options.get("thinking", False), options.get("few_shot", False))


def _write(script: Script, messages: Sequence[Message], asked: _Asked) -> None:
    """Write a conversation, few shots or a text to say. Raises `InvalidRequest`."""
    last = len(messages) - 1
    if messages[last].role != "user":
        raise wrong(f"messages[{last}].role", messages[last].role, "user: the model replies to the last message")
    if asked.few_shot:
        _few_shot(script, messages)
        return
    before = [message for message in messages if message.role == "system"]
    voices = [part for message in before for part in _recordings(message)]
    if len(voices) > 1:
        raise InvalidRequest(
            f"the system message has {len(voices)} recordings; the reply has one voice", field="messages"
        )
    voice = voices[0] if voices else None
    system = "\n".join(text for message in before if (text := _text(message)))
    turns = [message for message in messages if message.role != "system"]
    if asked.spoken and len(turns) == 1 and not _recordings(turns[0]):
        if system:
            raise InvalidRequest(
                "a system message has a text, but the user's text is said; send it as the option instructions",
                field="messages",
            )
        _say(script, _text(turns[0]), asked, voice, "messages")
        return
    if asked.how:
        raise InvalidRequest(
            "options.instructions says how to say a text, but the model is to reply", field="options.instructions"
        )
    if voice is not None:
        script.voice(voice)
    _converse(script, turns, asked, system)


def _follow(script: Script, messages: Sequence[Message], asked: _Asked) -> None:
    """Write what follows a reply that the script ends with. Raises `InvalidRequest`."""
    for name, given in (("few_shot", asked.few_shot), ("instructions", asked.how)):
        if given:
            raise InvalidRequest(
                f"options.{name} is set, but previous as well: it begins a conversation", field=f"options.{name}"
            )
    for number, message in enumerate(messages):
        if message.role == "system":
            raise wrong(f"messages[{number}].role", "system", "user or assistant in a request with previous")
    if messages[-1].role != "user":
        last = len(messages) - 1
        raise wrong(f"messages[{last}].role", messages[last].role, "user: the model replies to the last message")
    script.end_turn()
    _converse(script, messages, asked, "")


def _converse(script: Script, turns: Sequence[Message], asked: _Asked, system: str) -> None:
    """Write the turns of a conversation, and begin the reply. `system`: the system message's text."""
    if asked.spoken and asked.thinking:
        raise InvalidRequest("options.thinking is true, but a spoken reply has no thoughts", field="options.thinking")
    for number, message in enumerate(turns):
        if message.role == "assistant":
            _replied(script, message)
            continue
        script.open("user")
        if system and number == 0:
            script.text(system)
            script.text("\n\n")
        script.parts(message.content)
        script.close()
    script.reply(spoken=asked.spoken, thinking=asked.thinking)


def _say(script: Script, text: str, asked: _Asked, voice: MediaPart | None, field: str) -> None:
    if asked.few_shot or asked.thinking:
        name = "few_shot" if asked.few_shot else "thinking"
        raise InvalidRequest(
            f"options.{name} is true, but the text is to be said; leave it out", field=f"options.{name}"
        )
    if not text.strip():
        raise InvalidRequest(f"{field} has no text to say", field=field)
    script.say(text, asked.how, voice)


def _replied(script: Script, message: Message) -> None:
    """A turn of the assistant."""
    script.open("assistant")
    if recordings := _recordings(message):
        script.spoken(_text(message), _only(recordings))
    else:
        script.text(_text(message))
    script.close()


def _few_shot(script: Script, messages: Sequence[Message]) -> None:
    """An instruction, pairs of a recording and a spoken reply, and the recording to reply to. Raises
    `InvalidRequest`."""
    roles = [message.role for message in messages]
    pairs = (len(roles) - 2) // 2
    if roles != ["system", *["user", "assistant"] * pairs, "user"]:
        raise InvalidRequest(
            f"options.few_shot is true, but the messages are of the roles {', '.join(roles)}; it takes a system "
            "message with the instruction, then a user's recording and the assistant's reply in turn, and "
            "a user's recording",
            field="messages",
        )
    script.text(f"[Int]:{_text(messages[0])}\n")
    for number, message in enumerate(messages[1:], 1):
        recordings = _recordings(message)
        if len(recordings) != 1:
            field = f"messages[{number}].content"
            raise InvalidRequest(f"{field} has {len(recordings)} recordings; with few_shot it has one", field=field)
        if message.role == "user":
            script.audio(recordings[0])
            script.text("\n")
        else:
            script.spoken(_text(message), recordings[0])
            script.text(" \n\n")
    script.mark(SPOKEN)


def _only(recordings: list[MediaPart]) -> MediaPart:
    if len(recordings) != 1:
        raise InvalidRequest(
            f"a message of the assistant has {len(recordings)} recordings; it has one, with its text", field="messages"
        )
    return recordings[0]


def _recordings(message: Message) -> list[MediaPart]:
    return [part for part in message.content if isinstance(part, MediaPart)]


def _text(message: Message) -> str:
    parts: list[Part] = message.content
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))
