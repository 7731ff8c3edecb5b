"""The checkpoint's chat template, tokenizer and processor, as far as it has them."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segue.kernels.torchvision_shim import ensure_torchvision
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import ChatOptions, MediaPart, Message
from segue.models.prompt import templated, turn

ensure_torchvision()  # before anything of transformers

from transformers import AutoTokenizer, Qwen2_5OmniProcessor  # noqa: E402

try:  # how a processor is given a video's sound: the mixin came with the new way
    from transformers.processing_utils import OmniModalProcessorMixin  # noqa: F401

    _SOUND_OF_VIDEO: dict[str, Any] = {"load_audio_from_video": True, "audio_from_video_indices": [0]}
except ImportError:
    _SOUND_OF_VIDEO = {"use_audio_in_video": True}

PLACEHOLDERS = {"image": "<|IMAGE|>", "audio": "<|AUDIO|>", "video": "<|VIDEO|>"}
"""The published tokenizer's; the attributes `image_token`, … of the checkpoint's own say otherwise."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Chat:
    """What turns messages into ids. `processor` is None in text-only checkpoints."""

    tokenizer: Any
    template: str | None
    processor: Any = None

    def placeholder(self, kind: str) -> str:
        """The text a medium stands for in the template's output."""
        if self.processor is None:
            return PLACEHOLDERS[kind]
        tokens = {
            "image": self.processor.image_token,
            "audio": self.processor.audio_token,
            "video": self.processor.video_token,
        }
        return tokens[kind]

    def placeholder_id(self, kind: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self.placeholder(kind)))

    def text(self, messages: list[Message], chat: ChatOptions) -> str:
        """The templated conversation; each medium is one placeholder."""
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
        """A templated conversation, tokenized."""
        return list(self.tokenizer(text)["input_ids"])

    def expand(self, text: str, **media: Any) -> dict[str, torch.Tensor]:
        """The processor's own answer for one medium and the text it stands in."""
        return dict(self.processor(text=[text], return_tensors="pt", **media))

    def expand_video_with_sound(self, text: str, **media: Any) -> dict[str, torch.Tensor]:
        """The same for a video and its sound, which has no placeholder of its own."""
        with warnings.catch_warnings():
            # the library asks numpy for a range of torch numbers, which numpy 2 comments on
            warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
            return self.expand(text, **media, **_SOUND_OF_VIDEO)


def load_chat(model_dir: Path) -> Chat | None:
    """None where the checkpoint has no tokenizer: it is served by `prompt_token_ids` alone."""
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        return None
    template = _template(model_dir)
    try:
        if not any((model_dir / name).is_file() for name in _PROCESSOR_FILES):
            tokenizer = AutoTokenizer.from_pretrained(model_dir)
            return Chat(tokenizer, template or tokenizer.chat_template)
        processor = Qwen2_5OmniProcessor.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model_dir}: the tokenizer or the processor cannot be read: {error}", field="model"
        ) from error
    return Chat(processor.tokenizer, template or processor.chat_template, processor)


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
