"""The tokenizer of a checkpoint, with the tokens between which speech stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.shared.text.tokenizer import load_tokenizer
from segue.models.speech.mimo_audio.config import Config

EMPTY = "<|empty|>"
"""The text token of a patch of codes."""
BEGIN, END = "<|sosp|>", "<|eosp|>"
"""Around a recording in the prompt."""
SPOKEN, SPOKEN_END = "<|sostm|>", "<|eostm|>"
"""Around text and speech that alternate."""
TEXT_END = "<|eot|>"
"""After the text among them."""
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
STOP = "<|endoftext|>"
_SPEECH = (BEGIN, END, EMPTY, "<|Human|>", "<|SpeechLM|>", SPOKEN, SPOKEN_END, TEXT_END)
"""In the published order, in which they follow the vocabulary of a tokenizer that lacks them."""


def tokenizer_of(model_dir: Path, config: Config) -> Any:
    """Raises `ConfigError` for a checkpoint without a tokenizer, or with one that does not fit."""
    tokenizer = load_tokenizer(model_dir)
    if tokenizer is None:
        raise ConfigError(f"{model_dir}: the checkpoint has no tokenizer", field="model")
    if missing := [token for token in (STOP, TURN, TURN_END) if token not in tokenizer.get_vocab()]:
        raise ConfigError(f"{model_dir}: the tokenizer has no token {missing[0]!r}", field="model")
    tokenizer.add_tokens([token for token in _SPEECH if token not in tokenizer.get_vocab()], special_tokens=True)
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise ConfigError(
            f"{model_dir}: the tokenizer has token {largest}, but vocab_size is {config.vocab_size}", field="vocab_size"
        )
    return tokenizer


def id_of(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))
