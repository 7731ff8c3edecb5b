"""The input stage: a request → prompt ids, positions and patches of images. `stages` documents the payload.

Each text and each image of the messages is a passage between two marks, in order; the reply is one more passage, whose
first mark ends the prompt. The model knows no roles. Text takes a position per token, an image takes one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from PIL import Image

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Work
from segue.graph.parts import TOKENS
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import ChatOptions, MediaPart, Message, Request, TextPart
from segue.models.omni.bagel import sizes
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.vision import patches
from segue.models.shared.input_stage import InputStage
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

BEGIN, END = "<|im_start|>", "<|im_end|>"
_MARKS = (BEGIN, END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_TEXT_STAGE = "llm"


@dataclass(slots=True)
class _Passages:
    """The passages of a prompt so far."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    media: list[Payload] = field(default_factory=list)
    next: int = 0
    """The position of what comes next."""

    def text(self, ids: list[int]) -> None:
        self.ids += ids
        self.positions += range(self.next, self.next + len(ids))
        self.next += len(ids)

    def image(self, ids: list[int], image: Payload) -> None:
        self.media.append({**image, "span": (len(self.ids), len(self.ids) + len(ids))})
        self.ids += ids
        self.positions += [self.next] * len(ids)
        self.next += 1


class InputProcessor(InputStage):
    """Accepts messages with images, a bare prompt or token ids.

    Options: `limits`, a dict of `MediaLimits` fields.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError`, also for a tokenizer without the model's marks."""
        self._config = read_config(ctx.model_dir)
        longest = self._config.llm.max_position_embeddings
        self._longest = min(ctx.max_model_len or longest, longest)
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._limits.budget
        self._tokenizer = load_tokenizer(ctx.model_dir)
        self._ids = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        if missing := [mark for mark in _MARKS if self._tokenizer is not None and mark not in self._ids]:
            raise ConfigError(f"{ctx.model_dir}: its tokenizer has no token {missing[0]!r}", field="model")

    def begin(self, request: StageRequest) -> tuple[None, list[Work]]:
        # one bucket per request: no request waits until the images of another are decoded
        return None, [Work(request.request_id, request.request, bucket=request.request_id, last=True)]

    @torch.inference_mode()
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""
        prompt = _Passages()
        form = given_as(request)
        match form:
            case "messages":
                self._read(request.messages, request, prompt)
            case "prompt":
                prompt.text(tokenized(self._tokenizer, request, self._longest, _TEXT_STAGE))
            case _:
                prompt.text(checked_ids(request.prompt_token_ids or [], self._config.llm.vocab_size))
        kept = truncated(prompt.ids, request, _TEXT_STAGE, self._longest, media=bool(prompt.media))
        if len(kept) < len(prompt.ids):
            prompt = _Passages()
            prompt.text(kept)
        if not own_tokens_only(request):
            seen = sum(stop - start for start, stop in (image["span"] for image in prompt.media))
            check_length(len(prompt.ids), self._longest, form, f" ({seen} of them image)" if seen else "")
        return {
            "token_ids": torch.tensor(prompt.ids, dtype=torch.long),
            "positions": torch.tensor([prompt.positions], dtype=torch.long),
            "position_delta": prompt.next - len(prompt.ids),
            "media": prompt.media,
            **(client_tokens(prompt.ids, self._tokenizer) if TOKENS in request.modalities else {}),
        }

    def _read(self, messages: list[Message], request: Request, prompt: _Passages) -> None:
        """The passages of a conversation, and the mark that begins the reply."""
        if self._tokenizer is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer; send prompt_token_ids in place of messages", field="messages"
            )
        _check_chat(messages, request.chat)
        images = sum(isinstance(part, MediaPart) for message in messages for part in message.content)
        self._limits.check_items(images, "messages")
        begin, end, before, behind, pad = (self._ids[mark] for mark in _MARKS)
        for number, message in enumerate(messages):
            for index, part in enumerate(message.content):
                place = part.field or f"messages[{number}].content[{index}]"
                if isinstance(part, TextPart):
                    check_text(part.text, self._tokenizer, request, self._longest, _TEXT_STAGE, place)
                    # special tokens in a text are text
                    ids = self._tokenizer(part.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                    prompt.text([begin, *ids, end])
                elif part.kind != "image":
                    raise InvalidRequest(f"{place} is {part.kind}; this model takes text and images", field=place)
                else:
                    image = self._image(part)
                    prompt.image([before, *([pad] * len(image["patches"])), behind], image)
        prompt.text([begin])

    def _image(self, part: MediaPart) -> Payload:
        """An image at the size at which the model sees it. As published, it is first scaled as one that is edited."""
        pixels = Image.fromarray(decode_image(part, self._limits))
        for limits in (sizes.edited(self._config), sizes.seen(self._config)):
            pixels = pixels.resize(sizes.scaled(*pixels.size, limits), Image.Resampling.BICUBIC)
        raw, size = pixels.tobytes(), self._config.vit.patch_size
        values = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(pixels.height, pixels.width, 3)
        return {
            "kind": "image",
            "hash": hashlib.blake2b(repr(pixels.size).encode() + raw, digest_size=32).digest(),
            "patches": patches(values.permute(2, 0, 1) / 127.5 - 1, size),
            "grid": (pixels.height // size, pixels.width // size),
        }


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
