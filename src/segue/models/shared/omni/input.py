"""The input stage of an omni model: a request → prompt ids and media tensors, using the family's processor.

The library's processor runs on each medium separately, with its placeholder as text: this returns the medium's tensors
and the ids that replace its placeholder in the tokenized chat. The result equals one processor call over everything
(special tokens split the text before tokenization), but without padding and with each medium separate. The
family's `stages` documents the payload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import msgspec
import torch

from segue.engines.contract import LoadContext, Payload
from segue.engines.module.contract import Result, Work
from segue.graph.parts import TOKENS
from segue.media.limits import MediaLimits
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, nearest, wrong
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.messages.units import ids_of
from segue.models.registry import read_config
from segue.models.shared.input_stage import InputStage
from segue.models.shared.library import ProcessorMixin
from segue.models.shared.omni.chat import KINDS, Chat, load_chat
from segue.models.shared.omni.medium import Expanded, MediaReader
from segue.models.shared.omni.say import SAY, asking, text_to_say
from segue.models.shared.text.going_on import after_a_reply, requests_of, without_second_end
from segue.models.shared.text.placeholders import Place, check_no_media, expanded, one_each
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

_ROLES = ("system", "user", "assistant", "tool")
_TEXT_STAGE = "thinker"


class OmniInput(InputStage):
    """Prepares one request per call.

    Options: `limits`, a dict of `MediaLimits` fields.
    """

    goes_on = True
    alone = True

    def __init__(
        self,
        ctx: LoadContext,
        processor_class: type[ProcessorMixin],
        placeholders: Mapping[str, str],
        voices: frozenset[str],
        reader: type[MediaReader] = MediaReader,
        *,
        speaks_as: str | None = None,
    ) -> None:
        """`placeholders`: by kind, for checkpoints without a processor; `speaks_as`: the system prompt with which the
        model says a given text, if it needs one. Raises `ConfigError`."""
        config = read_config(ctx.model_dir)
        try:
            text = config["thinker_config"]["text_config"]
            self._vocab = int(text["vocab_size"])
        except KeyError as error:
            raise ConfigError(f"config.json of {str(ctx.model_dir)!r} has no {error}", field="model") from error
        self._longest = ctx.max_model_len or int(text.get("max_position_embeddings", 32768))
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._limits.budget
        skips = ctx.skip_tokenizer_init
        self._chat: Chat | None = None if skips else load_chat(ctx.model_dir, processor_class, placeholders)
        self._reader = reader(self._chat, self._limits) if self._chat is not None else None
        self._voices = voices
        self._speaks_as = speaks_as

    def warm_up(self) -> None:
        """Process one short text."""
        if self._chat is not None:
            self.process(Request(request_id="warm-up", messages=[Message("user", [TextPart("Good morning!")])]))

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        return super().run(works)

    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""
        if request.voice is not None and request.voice not in self._voices:
            raise NotFound(f"no voice {request.voice!r}{nearest(request.voice, self._voices)}", field="voice")
        reply: list[int] = []
        ids: list[int] = []
        media: list[Expanded] = []
        for number, one in enumerate(requests_of(request)):
            if number:
                ids += ids_of(request.earlier[number - 1].units)
            reply = []
            if (text := text_to_say(one, _TEXT_STAGE)) is not None:
                reply = self._reply(text, one)
                messages = asking(one.messages, text, None if number else self._speaks_as)
                one = msgspec.structs.replace(one, messages=messages)
            own, shown = self._own(one, ids, follows=bool(number))
            media += shown
            ids = truncated([*ids, *own], one, _TEXT_STAGE, self._longest, media=bool(media))
        if request.earlier:
            self._check_conversation(media)
        if not own_tokens_only(request):
            self._check_length(ids, media, given_as(request, media=True))
        seen = TOKENS in request.modalities
        entries = [entry for medium in media for entry in medium.entries]
        return {
            "token_ids": torch.tensor(ids, dtype=torch.long),
            "media": entries,
            "use_audio_in_video": any(len(medium.entries) > 1 for medium in media),
            **({"reply": reply} if reply else {}),
            **(client_tokens(ids, self._chat.tokenizer if self._chat is not None else None) if seen else {}),
        }

    def _own(self, request: Request, before: list[int], *, follows: bool) -> tuple[list[int], list[Expanded]]:
        """The ids of a request itself, and its media in order. `before`: the ids that it `follows`, if it does."""
        audio = request.options.get("use_audio_in_video", False)
        if not isinstance(audio, bool):
            raise wrong("options.use_audio_in_video", audio, "true or false")
        form = given_as(request, media=True)
        match form:
            case "messages":
                ids, media = self._templated(request, follows=follows, with_audio=audio)
                return (without_second_end(ids, before) if follows else ids), media
            case "prompt":
                return self._with_media(self._tokenized(request), request, form, with_audio=audio)
            case _:
                ids = checked_ids(request.prompt_token_ids or [], self._vocab)
                return self._with_media(ids, request, form, with_audio=audio)

    def _check_conversation(self, media: list[Expanded]) -> None:
        """Check the media of several requests together. Raises `InvalidRequest`."""
        self._limits.check_items(len(media), "messages")
        if len({len(medium.entries) for medium in media if medium.entries[0]["kind"] == "video"}) > 1:
            raise InvalidRequest(
                "some videos of the conversation have an audio track and others have none; with use_audio_in_video "
                "either all have one or none",
                field="previous",
            )

    def _reply(self, text: str, request: Request) -> list[int]:
        """The ids of a text to say; special tokens in it are plain text."""
        if self._chat is None:
            raise InvalidRequest("this checkpoint has no tokenizer, so it cannot say a text", field=f"options.{SAY}")
        self._check_text(TextPart(text), "messages")
        check_text(text, self._chat.tokenizer, request, self._longest, _TEXT_STAGE, "messages")
        return list(self._chat.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _tokenized(self, request: Request) -> list[int]:
        """The ids of a bare prompt: no template."""
        return tokenized(self._chat.tokenizer if self._chat is not None else None, request, self._longest, _TEXT_STAGE)

    def _templated(self, request: Request, *, follows: bool, with_audio: bool) -> tuple[list[int], list[Expanded]]:
        """The conversation's ids, with every placeholder repeated to its medium's length, and the media in order.
        `follows`: only what the template writes after a reply."""
        if self._chat is None or self._reader is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer; send prompt_token_ids in place of messages", field="messages"
            )
        parts = self._checked(request.messages)
        media = self._reader.read(parts, with_audio=with_audio)
        _check_audio(parts, media)
        render = partial(self._chat.text, chat=request.chat)
        text = after_a_reply(request.messages, render) if follows else render(request.messages)
        check_text(text, self._chat.tokenizer, request, self._longest, _TEXT_STAGE, "messages")
        ids = self._chat.ids(text)
        places = one_each(ids, self._placeholders(), Counter(part.kind for part in parts))
        if places is None:
            raise InvalidRequest("the chat template has not one place for each of the media parts", field="messages")
        return _placed(ids, places, parts, media)

    def _with_media(
        self, ids: list[int], request: Request, form: str, *, with_audio: bool
    ) -> tuple[list[int], list[Expanded]]:
        """The same for the ids of a prompt and its media: a medium has one placeholder, or its ids."""
        if not request.messages:
            if self._chat is not None and not own_tokens_only(request):
                check_no_media(ids, {kind: frozenset({token}) for kind, token in self._placeholders().items()}, form)
            return ids, []
        if self._chat is None or self._reader is None:
            field = request.media()[0].field or "messages"
            raise InvalidRequest(f"{field}: this checkpoint has no tokenizer, so it takes no media", field=field)
        parts = self._checked(request.messages)
        media = self._reader.read(parts, with_audio=with_audio)
        _check_audio(parts, media)
        expansions = {
            kind: [medium.ids for medium, part in zip(media, parts, strict=True) if part.kind == kind] for kind in KINDS
        }
        places = one_each(ids, self._placeholders(), Counter(part.kind for part in parts))
        if places is None:
            places = expanded(ids, self._placeholders(), expansions, form)
        return _placed(ids, places, parts, media)

    def _placeholders(self) -> dict[str, int]:
        assert self._chat is not None
        return {kind: self._chat.placeholder_id(kind) for kind in KINDS}

    def _checked(self, messages: list[Message]) -> list[MediaPart]:
        """All media of the messages, in order. Raises for content that must not reach the template."""
        assert self._chat is not None
        media: list[MediaPart] = []
        for number, message in enumerate(messages):
            if message.role not in _ROLES:
                field = f"messages[{number}].role"
                raise InvalidRequest(f"{field} is {message.role!r}{nearest(message.role, _ROLES)}", field=field)
            for index, part in enumerate(message.content):
                field = f"messages[{number}].content[{index}]"
                if isinstance(part, MediaPart):
                    if self._chat.processor is None:
                        field = part.field or field
                        raise InvalidRequest(f"{field}: this checkpoint takes text, no {part.kind}", field=field)
                    media.append(part)
                else:
                    self._check_text(part, field)
        self._limits.check_items(len(media), "messages")
        return media

    def _check_text(self, part: TextPart, field: str) -> None:
        assert self._chat is not None
        for kind in KINDS:
            if (placeholder := self._chat.placeholder(kind)) in part.text:
                raise InvalidRequest(
                    f"{field}: the text holds {placeholder!r}, which stands for {kind}; send a part of that kind",
                    field=field,
                )

    def _check_length(self, ids: list[int], media: list[Expanded], field: str) -> None:
        taken = Counter[str]()
        for medium in media:
            taken[medium.entries[0]["kind"]] += len(medium.ids)
        shares = ", ".join(f"{count} of them {kind}" for kind, count in taken.items())
        check_length(len(ids), self._longest, field, f" ({shares})" if shares else "")


def _placed(
    ids: list[int], places: list[Place], parts: list[MediaPart], media: list[Expanded]
) -> tuple[list[int], list[Expanded]]:
    """Put the ids of media in their places: the prompt's ids, and the media in its order."""
    by_kind = {kind: [medium for medium, part in zip(media, parts, strict=True) if part.kind == kind] for kind in KINDS}
    whole: list[int] = []
    order: list[Expanded] = []
    at = 0
    for place in places:
        order.append(by_kind[place.kind][place.index])
        whole += [*ids[at : place.start], *order[-1].ids]
        at = place.stop
    return [*whole, *ids[at:]], order


def _check_audio(parts: list[MediaPart], media: list[Expanded]) -> None:
    """All videos of a prompt must have audio tracks or none: the model has one flag for the whole prompt."""
    videos = [
        (part, len(medium.entries) > 1) for part, medium in zip(parts, media, strict=True) if part.kind == "video"
    ]
    if any(has_audio for _, has_audio in videos):
        for part, has_audio in videos:
            if not has_audio:
                raise InvalidRequest(
                    f"{part.field or 'video'}: has no audio track while another video has; with use_audio_in_video "
                    "either all have one or none",
                    field=part.field or None,
                )
