"""The input stage of a multimodal language model: a request → prompt ids, positions and media tensors, using the
checkpoint's processor and chat template. `stages` documents the payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.media.audio import decode_audio
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.messages.units import ids_of
from segue.models.omni.multimodal_lm.loading import media_tokens
from segue.models.omni.multimodal_lm.positions import Positions
from segue.models.omni.multimodal_lm.processor import Medium, Processed, Processor
from segue.models.omni.multimodal_lm.splice import spliced
from segue.models.omni.multimodal_lm.units import units_of
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.generation import context_length
from segue.models.shared.input_stage import InputStage
from segue.models.shared.text.chat_template import read_chat_template
from segue.models.shared.text.going_on import after_a_reply, requests_of, without_second_end
from segue.models.shared.text.placeholders import check_counts, check_no_media
from segue.models.shared.text.prompt import (
    check_length,
    check_text,
    checked_ids,
    client_tokens,
    given_as,
    own_tokens_only,
    templated,
    tokenized,
    truncated,
    turn,
    with_calls,
)
from segue.models.shared.text.prompt_embeds import (
    NO_TOKEN,
    check_idless,
    check_marked,
    in_place,
    read_embeds,
    read_parts,
)
from segue.models.shared.text.tokenizer import marked_tokenizer

_TEXT_STAGE = "llm"
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, ZeroDivisionError)
"""Exceptions of processors for media that they cannot take (too narrow, too short, too few frames)."""


class InputProcessor(InputStage):
    """Accepts messages with media and embeddings, a bare prompt or token ids along with media, or embeddings.

    Options: `limits`, a dict of `MediaLimits` fields.
    """

    alone = True
    takes_embeds = True
    goes_on = True
    _least = 2
    """Minimum tokens of a unit."""

    def __init__(self, ctx: LoadContext) -> None:
        text = load_config(ctx).get_text_config(decoder=True)
        self._vocab: int = text.vocab_size
        self._longest = context_length(text, ctx.max_model_len)
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._limits.budget
        self._processor = Processor(ctx.model_dir, media_tokens(ctx))
        template = read_chat_template(ctx.model_dir)
        self._template = self._processor.template if template is None else template.text
        self._positions = Positions(ctx)
        self._width: int = text.hidden_size
        self._most_bytes: int = ctx.options.get("max_prompt_embeds_bytes", 0)
        self._marked = marked_tokenizer(ctx.model_dir) if self._most_bytes and self._template is not None else None

    @torch.inference_mode()
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""
        form = given_as(request, media=True, embeds=self.takes_embeds)
        whole = requests_of(request)
        self._limits.check_items(sum(len(one.media()) for one in whole), "messages")
        ids: list[int] = []
        rows: list[torch.Tensor] = []
        media: list[tuple[int, Processed]] = []
        units: list[Payload] = []
        for number, one in enumerate(whole):
            if number:
                ids += ids_of(request.earlier[number - 1].units)
            own, rows, made = self._own(one, ids, follows=bool(number))
            if made is not None:
                start = len(ids) + len(own) - len(made.ids)
                media.append((start, made))
                shown = self._units(made, Counter(part.kind for part in one.media()))
                units += ({**unit, "places": unit["places"] + start} for unit in shown)
            ids = truncated([*ids, *own], one, _TEXT_STAGE, self._longest, media=bool(media))
        if not own_tokens_only(request):
            check_length(len(ids), self._longest, form, _shares(units))
        for unit in units:
            if len(unit["places"]) < self._least:  # models treat a lone placeholder as one that is still to be repeated
                raise InvalidRequest(f"the {unit['kind']} is too small or too short for this model", field=form)
        return {
            "token_ids": torch.tensor(ids, dtype=torch.long),
            **({"embeds": torch.cat(rows)} if rows else {}),
            **(self._extra_entries(ids, media) if media else {}),
            "media": units,
            **(client_tokens(ids, self._processor.tokenizer) if TOKENS in request.modalities else {}),
        }

    def _own(
        self, request: Request, before: list[int], *, follows: bool
    ) -> tuple[list[int], list[torch.Tensor], Processed | None]:
        """The ids of a request itself, the rows of its embeddings, and its own prompt if it has media: the ids are the
        last of it. `before`: the ids that it `follows`, if it does; then its media are put between its ids, because a
        processor takes every text for a whole prompt, which it may begin and end (Llama 3.2 Vision, PaliGemma)."""
        form = given_as(request, media=True, embeds=self.takes_embeds)
        parts = self._checked(request.messages)
        made: Processed | None = None
        rows: list[torch.Tensor] = []
        ids: list[int] = []
        match form:
            case "prompt_embeds":
                check_idless(request, _TEXT_STAGE, form)
                rows = [read_embeds(request.prompt_embeds or b"", self._width, self._longest, self._most_bytes)]
                ids = [NO_TOKEN] * len(rows[0])
            case "messages" if embedded := request.embedded():
                ids, rows = self._embedded(request, embedded, parts)
            case "messages":
                text = self._templated(request, parts, follows=follows)
                check_text(text, self._processor.tokenizer, request, self._longest, _TEXT_STAGE, form)
                if parts and not follows:
                    made = self._processed(text, parts, request, form)
                else:
                    ids = self._processor.plain(text, add_special_tokens=request.add_special_tokens)
            case "prompt" if parts and not follows:
                made = self._prompted(request, parts)
            case "prompt":
                ids = tokenized(self._processor.tokenizer, request, self._longest, _TEXT_STAGE)
            case _:
                tokens = frozenset().union(*self._processor.tokens().values())
                ids = checked_ids(request.prompt_token_ids or [], self._vocab, tokens)
        if parts and made is None:
            made = self._spliced(ids, parts, form, follows=follows)
        elif not parts and form != "messages" and not own_tokens_only(request):
            check_no_media(ids, self._processor.tokens(), form)
        ids = ids if made is None else made.ids
        return (without_second_end(ids, before) if form == "messages" else ids), rows, made

    def _units(self, made: Processed, count: Mapping[str, int]) -> list[Payload]:
        return units_of(made, count)

    def _extra_entries(self, ids: list[int], media: Sequence[tuple[int, Processed]]) -> Payload:
        """Further payload entries of a prompt with media: its ids, and the parts that have some, each with its
        place."""
        positions = self._positions(ids, media)
        return {} if positions is None else {"positions": positions[0], "position_delta": positions[1]}

    def _templated(self, request: Request, parts: list[MediaPart], mark: str = "", *, follows: bool = False) -> str:
        """The conversation with one placeholder per medium. `mark`: stands for a part that is embeddings. `follows`:
        only what the template writes after a reply."""
        if self._template is None:
            text = self._bare(request.messages, follows=follows)
        else:
            render = partial(self._chat, request, self._template, mark)
            text = after_a_reply(request.messages, render) if follows else render(request.messages)
        for kind, placeholder in self._processor.placeholders.items():
            wanted = sum(part.kind == kind for part in parts)
            if (found := text.count(placeholder)) != wanted:
                raise InvalidRequest(
                    f"the chat template renders {found} placeholders for {kind}; the messages have {wanted}",
                    field="messages",
                )
        return text

    def _embedded(
        self, request: Request, embedded: list[TextPart], parts: list[MediaPart]
    ) -> tuple[list[int], list[torch.Tensor]]:
        """The ids of messages with some parts as embeddings, and their rows; media are still one placeholder each."""
        field = embedded[0].field
        check_idless(request, _TEXT_STAGE, field)
        rows = read_parts(embedded, self._width, self._longest, self._most_bytes)
        marked = check_marked(self._marked, field)
        text = self._templated(request, parts, marked.mark)
        check_text(text, marked.tokenizer, request, self._longest, _TEXT_STAGE, "messages")
        adds = self._processor.adds(text) if request.add_special_tokens is None else request.add_special_tokens
        return in_place(marked.tokenizer(text, add_special_tokens=adds)["input_ids"], marked.token, rows), rows

    def _chat(self, request: Request, template: str, mark: str, messages: list[Message]) -> str:
        conversation = [
            with_calls(turn(message, [_content(part, mark) for part in message.content]), number)
            for number, message in enumerate(messages)
        ]
        return templated(self._processor.tokenizer, template, conversation, request.chat)

    def _bare(self, messages: list[Message], *, follows: bool) -> str:
        """For a checkpoint without a chat template: the only message, which must have media, unchanged."""
        if follows:
            raise InvalidRequest(
                "previous is set, but this checkpoint has no chat template; go on with a prompt or prompt_token_ids",
                field="messages",
            )
        places = self._processor.placeholders
        if (
            len(messages) != 1
            or messages[0].role != "user"
            or not any(isinstance(p, MediaPart) for p in messages[0].content)
        ):
            raise InvalidRequest(
                "this checkpoint has no chat template; send one user message with media, or a prompt or "
                "prompt_token_ids in place of messages",
                field="messages",
            )
        return "".join(places[part.kind] if isinstance(part, MediaPart) else part.text for part in messages[0].content)

    def _checked(self, messages: list[Message]) -> list[MediaPart]:
        media: list[MediaPart] = []
        for number, message in enumerate(messages):
            for index, part in enumerate(message.content):
                field = f"messages[{number}].content[{index}]"
                if isinstance(part, TextPart):
                    self._check_text(part.text, field)
                elif part.kind not in self._processor.kinds:
                    raise InvalidRequest(
                        f"{part.field or field} is {part.kind}; this model takes text, "
                        f"{', '.join(self._processor.kinds)}",
                        field=part.field or field,
                    )
                else:
                    media.append(part)
        return media

    def _check_text(self, text: str, field: str) -> None:
        for kind, placeholder in self._processor.placeholders.items():
            if placeholder in text:
                raise InvalidRequest(
                    f"{field}: the text holds {placeholder!r}, which stands for {kind}; send messages with a part of "
                    "that kind",
                    field=field,
                )

    def _prompted(self, request: Request, parts: list[MediaPart]) -> Processed:
        """A bare prompt with one placeholder for each of its media."""
        text = request.prompt or ""
        check_text(text, self._processor.tokenizer, request, self._longest, _TEXT_STAGE, "prompt")
        found = {kind: text.count(placeholder) for kind, placeholder in self._processor.placeholders.items()}
        check_counts(found, Counter(part.kind for part in parts), "prompt")
        return self._processed(text, parts, request, "prompt")

    def _processed(self, text: str, parts: list[MediaPart], request: Request, form: str) -> Processed:
        media = self._media(parts)
        with _refusals(form):
            return self._processor(text, media, add_special_tokens=request.add_special_tokens)

    def _spliced(self, ids: list[int], parts: list[MediaPart], form: str, *, follows: bool) -> Processed:
        """The ids of a prompt, with its media in their places. `follows`: as for `spliced`."""
        media = self._media(parts)
        with _refusals(form):
            return self._moved(*spliced(self._processor, ids, media, form, follows=follows))

    def _moved(self, made: Processed, origin: list[int]) -> Processed:
        """`origin`: as `spliced` returns it; for tensors with an entry per token."""
        return made

    def _media(self, parts: list[MediaPart]) -> dict[str, list[Medium]]:
        media: dict[str, list[Medium]] = {}
        for part in parts:
            media.setdefault(part.kind, []).append(self._decoded(part))
        return media

    def _decoded(self, part: MediaPart) -> Medium:
        if part.kind == "image":
            return decode_image(part, self._limits)
        if part.kind == "video":
            return decode_video(part, self._processor.fps, self._limits, count=self._processor.clip_frames)
        samples = decode_audio(part, self._processor.sampling_rate, self._limits)
        longest = self._processor.longest_audio
        if longest is not None and len(samples) > longest:
            rate = self._processor.sampling_rate
            raise InvalidRequest(
                f"{part.field or 'audio'} is {len(samples) / rate:.1f} seconds long; this model takes "
                f"{longest / rate:g} seconds of audio",
                field=part.field or None,
            )
        return samples


@contextmanager
def _refusals(field: str) -> Iterator[None]:
    """Raise `InvalidRequest` in place of the processor's own exceptions."""
    try:
        yield
    except InvalidRequest:
        raise
    except _REFUSALS as error:
        raise InvalidRequest(f"this model's processor refuses the media: {error}", field=field) from error


def _content(part: TextPart | MediaPart, mark: str) -> dict[str, Any]:
    if isinstance(part, MediaPart):
        return {"type": part.kind}
    return {"type": "text", "text": part.text if part.embeds is None else mark}


def _shares(units: list[Payload]) -> str:
    taken = Counter[str]()
    for unit in units:
        taken[unit["kind"]] += len(unit["places"])
    shares = ", ".join(f"{count} of them {kind}" for kind, count in taken.items())
    return f" ({shares})" if shares else ""
