"""The input stage: a request → passages of text and images. `stages` documents the payloads.

Each text and each image of the messages is a passage, in order (`passages`). A reply is one more passage, whose first
mark ends the prompt. The model knows no roles.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from PIL import Image

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import ChatOptions, Earlier, MediaPart, Message, Request, TextPart
from segue.messages.units import ids_of
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.drawing.settings import OPTIONS, OutputLimits, drawing_of, thinks
from segue.models.omni.bagel.graph import draws, interleaved
from segue.models.omni.bagel.prompt.images import edited, exact, seen
from segue.models.omni.bagel.prompt.passages import MARKS, Marks, Passages
from segue.models.shared.input_stage import InputStage
from segue.models.shared.text.going_on import requests_of
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
from segue.models.shared.text.tokenizer import load_tokenizer

_TEXT_STAGE = "llm"
THINK = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> "
    "image here"
)
"""The text with which the published model was asked to think, unless the request has a system message."""


class InputProcessor(InputStage):
    """Accepts messages with images, a bare prompt or token ids.

    Options: `limits`, a dict of `MediaLimits` fields.
    """

    goes_on = True
    alone = True

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError`, also for a tokenizer without the model's marks."""
        self._config = read_config(ctx.model_dir)
        longest = self._config.llm.max_position_embeddings
        self._longest = min(ctx.max_model_len or longest, longest)
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self._outputs = OutputLimits.of(ctx.options)
        self.budget = self._limits.budget
        self._tokenizer = load_tokenizer(ctx.model_dir)
        if self._tokenizer is not None:
            ids = self._tokenizer.get_vocab()
            if missing := [mark for mark in MARKS if mark not in ids]:
                raise ConfigError(f"{ctx.model_dir}: its tokenizer has no token {missing[0]!r}", field="model")
            self._marks = Marks(*(ids[mark] for mark in MARKS))

    @torch.inference_mode()
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""
        return self._for_image(request) if draws(request) else self._for_reply(request)

    def _for_reply(self, request: Request) -> Payload:
        _check_draws_nothing(request)
        prompt, media = Passages(), list[Payload]()
        form = given_as(request)
        for passage in self._conversation(request):
            if isinstance(passage, list):
                prompt.text(passage)
            else:
                media.append(seen(self._scaled(passage), self._config))
                prompt.image(self._marks, len(media[-1]["patches"]), len(media) - 1)
        if form == "messages":
            prompt.text([self._marks.begin])
        kept = truncated(prompt.ids, request, _TEXT_STAGE, self._longest, media=bool(media))
        if len(kept) < len(prompt.ids):
            prompt = Passages()
            prompt.text(kept)
        self._check_length(request, prompt, form)
        return {
            "token_ids": torch.tensor(prompt.ids, dtype=torch.long),
            "positions": torch.tensor([prompt.positions], dtype=torch.long),
            "position_delta": prompt.next - len(prompt.ids),
            "media": [
                {**image, "span": (block.start, block.stop)} for image, block in zip(media, prompt.blocks, strict=True)
            ],
            **self._tokens(request, prompt),
        }

    def _for_image(self, request: Request) -> Payload:
        form = given_as(request, media=True)
        if form == "prompt_token_ids":
            raise InvalidRequest("an image is drawn from text; send messages or a prompt", field="prompt_token_ids")
        images: list[Image.Image] = []
        passages: list[list[int] | int] = []
        for passage in self._conversation(request):
            if isinstance(passage, list):
                passages.append(passage)
            else:
                passages.append(len(images))
                images.append(self._scaled(passage))
        if not passages:
            raise InvalidRequest("messages have neither text nor images: say what to draw", field="messages")
        drawing = drawing_of(request, self._config, self._outputs, [(one.height, one.width) for one in images])
        media = [{**seen(image, self._config), **exact(image)} for image in images]
        whole = Passages()
        for one in passages:
            if isinstance(one, list):
                whole.text(one)
            else:
                size, image = self._config.token_pixels, images[one]
                whole.image(self._marks, (image.width // size) * (image.height // size), one, latent=True)
                whole.image(self._marks, len(media[one]["patches"]), one)
        self._check_length(request, whole, form)
        return {
            "passages": passages,
            "media": media,
            "drawing": msgspec.to_builtins(drawing),
            **self._tokens(request, whole),
        }

    def _tokens(self, request: Request, prompt: Passages) -> Payload:
        """The prompt's tokens, if the client wants them."""
        return client_tokens(prompt.ids, self._tokenizer) if TOKENS in request.modalities else {}

    def _check_length(self, request: Request, prompt: Passages, form: str) -> None:
        if not own_tokens_only(request):
            seen = sum(block.stop - block.start for block in prompt.blocks)
            check_length(len(prompt.ids), self._longest, form, f" ({seen} of them image)" if seen else "")

    def _conversation(self, request: Request) -> Iterator[list[int] | MediaPart]:
        """The passages of a request, after those of the requests that it goes on from and of their replies."""
        shown = [image for one in request.earlier for image in (*one.request.media(), *one.images)]
        self._limits.check_items(len(shown) + len(request.media()), "messages")
        for number, one in enumerate(requests_of(request)):
            if number:
                yield from self._replied(request.earlier[number - 1])
            yield from self._said(one)

    def _said(self, request: Request) -> Iterator[list[int] | MediaPart]:
        """What a request says itself: ids of texts, and images. A prompt for a reply has no marks but its own."""
        messages, drawn = request.messages, draws(request)
        form = given_as(request, media=drawn)
        if drawn and form == "prompt":
            messages = [*messages, Message("user", [TextPart(request.prompt or "")])]
        elif form == "prompt":
            yield tokenized(self._tokenizer, request, self._longest, _TEXT_STAGE)
            return
        elif form == "prompt_token_ids":
            yield checked_ids(request.prompt_token_ids or [], self._config.llm.vocab_size)
            return
        told = any(message.role == "system" or not message.content for message in messages)
        if drawn and not told and not interleaved(request) and thinks(request):
            yield self._text(THINK)
        yield from self._read(messages, request)

    def _replied(self, one: Earlier) -> Iterator[list[int] | MediaPart]:
        """What the reply to a request was: its text as it was drawn, and its images; by turns, if the walk returned."""
        if not draws(one.request) and given_as(one.request) != "messages":
            yield ids_of(one.units)
            return
        marks, start, images = self._marks, 0, iter(one.images)
        for stop in one.ends or [len(one.units)]:
            said = ids_of(one.units[start:stop])
            if said or not draws(one.request):
                yield [marks.begin, *said, *([] if said[-1:] == [marks.end] else [marks.end])]
            start = stop
            if one.ends and (image := next(images, None)) is not None:
                yield image
        yield from images

    def _read(self, messages: list[Message], request: Request) -> Iterator[list[int] | MediaPart]:
        """The texts of a conversation as ids with their marks, and its images, in order."""
        if self._tokenizer is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer; send prompt_token_ids in place of messages", field="messages"
            )
        _check_chat(messages, request.chat)
        for number, message in enumerate(messages):
            for index, part in enumerate(message.content):
                place = part.field or f"messages[{number}].content[{index}]"
                if isinstance(part, TextPart):
                    check_text(part.text, self._tokenizer, request, self._longest, _TEXT_STAGE, place)
                    yield self._text(part.text)
                elif part.kind != "image" or part.role:
                    raise InvalidRequest(
                        f"{place} is {part.role or part.kind}; this model takes text and images", field=place
                    )
                else:
                    yield part

    def _text(self, text: str) -> list[int]:
        """The ids of a text with its marks. Special tokens in it are text."""
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [self._marks.begin, *ids, self._marks.end]

    def _scaled(self, part: MediaPart) -> Image.Image:
        return edited(Image.fromarray(decode_image(part, self._limits)), self._config)


def _check_draws_nothing(request: Request) -> None:
    """Raise `InvalidRequest` for settings of an image in a request for a text."""
    given = [f"options.{name}" for name in request.options if name in OPTIONS]
    asked, unset = request.diffusion or DiffusionParams(), DiffusionParams()
    names = (name for name in DiffusionParams.__struct_fields__ if name != "progress")  # Python's progress bar
    given += [name for name in names if getattr(asked, name) != getattr(unset, name)]
    if given:
        name = given[0]
        raise InvalidRequest(f"{name} is for images, but modalities has no image", field=name)


def _check_chat(messages: list[Message], chat: ChatOptions) -> None:
    """Raise `InvalidRequest` for what needs a chat template, by its name."""
    given = {
        "tools": chat.tools,
        "continue_final_message": chat.continue_final_message,
        "add_generation_prompt": not chat.add_generation_prompt,
        **{f"template_kwargs.{name}": True for name in chat.template_kwargs},
        **{f"messages[{place}].tool_calls": one.extra.get("tool_calls") for place, one in enumerate(messages)},
    }
    for name, value in given.items():
        if value:
            raise InvalidRequest(f"{name}: this model has no chat template, so it does not take it", field=name)
