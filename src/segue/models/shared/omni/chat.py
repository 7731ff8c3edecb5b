"""Load the checkpoint's chat template, tokenizer and processor, where present; render and tokenize conversations."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import ChatOptions, MediaPart, Message
from segue.models.shared.library import AutoTokenizer, ProcessorMixin
from segue.models.shared.text.prompt import templated, turn

try:  # newer versions take a video's audio track in another way; this mixin came with it
    from transformers.processing_utils import OmniModalProcessorMixin  # noqa: F401

    _AUDIO_OF_VIDEO, _INDEXED = {"load_audio_from_video": True}, True
except ImportError:
    _AUDIO_OF_VIDEO, _INDEXED = {"use_audio_in_video": True}, False

KINDS = ("image", "audio", "video")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Chat:
    """Turns chat messages into token ids. `processor` is None in text-only checkpoints."""

    tokenizer: Any
    template: str | None
    placeholders: Mapping[str, str]
    """By kind, the published tokenizer's placeholder; the processor's own tokens override them."""
    processor: Any = None

    def placeholder(self, kind: str) -> str:
        """The text that marks one medium of this kind in the template's output."""
        if self.processor is None:
            return self.placeholders[kind]
        tokens = {
            "image": self.processor.image_token,
            "audio": self.processor.audio_token,
            "video": self.processor.video_token,
        }
        return tokens[kind]

    def placeholder_id(self, kind: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self.placeholder(kind)))

    def video_text(self) -> str:
        """The text of one video: the library finds the position of its audio track between the two tokens around the
        placeholder."""
        return f"{self.processor.vision_bos_token}{self.placeholder('video')}{self.processor.vision_eos_token}"

    def text(self, messages: list[Message], chat: ChatOptions) -> str:
        """Render the conversation with the template; each medium becomes one placeholder."""
        if self.template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; send a prompt or prompt_token_ids in place of messages",
                field="messages",
            )
        conversation = [
            turn(
                message,
                [
                    {"type": part.kind} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
                    for part in message.content
                ],
            )
            for message in messages
        ]
        return templated(self.processor or self.tokenizer, self.template, conversation, chat)

    def ids(self, text: str) -> list[int]:
        """Tokenize a rendered conversation."""
        return list(self.tokenizer(text)["input_ids"])

    def expand(self, text: str, **media: Any) -> dict[str, torch.Tensor]:
        """Run the library's processor on one medium and the text that contains its placeholder."""
        return dict(self.processor(text=[text], return_tensors="pt", **media))

    def expand_video_with_audio(self, text: str, **media: Any) -> dict[str, torch.Tensor]:
        """Run the processor on a video with its audio track, which has no placeholder of its own."""
        return self.expand_videos_with_audio(text, [0], **media)

    def expand_videos_with_audio(
        self, text: str, origins: Sequence[int | None], **media: Any
    ) -> dict[str, torch.Tensor]:
        """Run the processor on media among which are audio tracks of videos. `origins`: for each recording, the index
        of its video, or None."""
        with warnings.catch_warnings():
            # the library builds a numpy range from torch numbers, and numpy 2 warns
            warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
            return self.expand(text, **media, **audio_of_videos(origins))


def audio_of_videos(origins: Sequence[int | None]) -> dict[str, Any]:
    """Arguments of the installed library's processor for recordings among which are audio tracks of videos. `origins`:
    for each recording, the index of its video, or None."""
    if not any(origin is not None for origin in origins):
        return {}
    return {**_AUDIO_OF_VIDEO, **({"audio_from_video_indices": list(origins)} if _INDEXED else {})}


def load_chat(model_dir: Path, processor_class: type[ProcessorMixin], placeholders: Mapping[str, str]) -> Chat | None:
    """None if the checkpoint has no tokenizer: such a model accepts only `prompt_token_ids`."""
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        return None
    template = _template(model_dir)
    try:
        if not any((model_dir / name).is_file() for name in _PROCESSOR_FILES):
            tokenizer = AutoTokenizer.from_pretrained(model_dir)
            return Chat(tokenizer, template or tokenizer.chat_template, placeholders)
        processor: Any = processor_class.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model_dir}: the tokenizer or the processor cannot be read: {error}", field="model"
        ) from error
    return Chat(processor.tokenizer, template or processor.chat_template, placeholders, processor)


def _template(model_dir: Path) -> str | None:
    for name in _TEMPLATE_FILES:
        path = model_dir / name
        if path.is_file():
            text = path.read_text()
            return text if path.suffix == ".jinja" else _from_json(path, text)
    return None


def _from_json(path: Path, text: str) -> str:
    try:
        template = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path}: must hold {{"chat_template": "…"}}') from error
    if not isinstance(template, str):
        raise ConfigError(f"{path}: chat_template must be text")
    return template
