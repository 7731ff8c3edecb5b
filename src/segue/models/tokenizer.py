"""A checkpoint's tokenizer, as far as it has one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from segue.messages.errors import ConfigError
from segue.models.json_files import check_objects
from segue.models.library import AutoTokenizer, PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tokenizer_config.json")


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where it has none (it then serves `prompt_token_ids` only)."""
    if not any((model_dir / name).is_file() for name in _FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(model_dir)
    # tokenizers raises bare exceptions, and the library whatever a file of another form makes it stumble over
    except Exception as error:
        check_objects(model_dir, _FILES)
        raise ConfigError(f"{model_dir}: the tokenizer cannot be read: {error}", field="model") from error


@dataclass(frozen=True, slots=True)
class MarkedTokenizer:
    """A tokenizer that knows one token more, which marks places in a text."""

    tokenizer: PreTrainedTokenizerBase
    mark: str
    """Its text, which nobody outside this process knows."""
    token: int
    """Its id, which the model has not."""


def marked_tokenizer(model_dir: Path) -> MarkedTokenizer | None:
    """The checkpoint's tokenizer with a mark of its own; None where it has none, or one that takes no further token."""
    tokenizer = load_tokenizer(model_dir)
    if tokenizer is None:
        return None
    mark = f"<|prompt_embeds {secrets.token_hex(8)}|>"
    try:
        tokenizer.add_tokens([mark], special_tokens=True)
    except (NotImplementedError, AttributeError):  # of other makers (mistral-common)
        return None
    ids = tokenizer(f"a {mark}b", add_special_tokens=False)["input_ids"]
    token = tokenizer.convert_tokens_to_ids(mark)
    return MarkedTokenizer(tokenizer, mark, token) if ids.count(token) == 1 else None


def decode(tokenizer: PreTrainedTokenizerBase | None, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Text of ids; empty where the checkpoint has no tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
