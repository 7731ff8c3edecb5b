"""Load a checkpoint's tokenizer, if it has one, and find the bytes of its tokens.

Three ways of writing bytes into a vocabulary are supported: byte-level BPE (GPT-2's table of one printable character
per byte), byte fallback (SentencePiece: `▁` for a space, `<0x0A>` for a byte), and plain text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.files import check_objects
from segue.models.shared.library import AutoTokenizer, PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_level_table() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters map to themselves, other bytes to characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenizerVocabulary:
    """`Vocabulary` of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        added = {int(token): entry for token, entry in tokenizer.added_tokens_decoder.items()}
        kinds = set(_decoders(tokenizer))
        table = byte_level_table() if "ByteLevel" in kinds else None
        spaces = {"▁": " "} if kinds & {"Metaspace", "ByteFallback", "Replace"} else {}
        for token, token_id in tokenizer.get_vocab().items():
            entry = added.get(token_id)
            if entry is not None:
                self._names[token_id] = entry.content
                self._bytes[token_id] = b"" if entry.special else entry.content.encode()
            elif token_id in tokenizer.all_special_ids:
                self._names[token_id], self._bytes[token_id] = token, b""
            else:
                self._bytes[token_id] = _bytes_of(token, table, spaces, fallback="ByteFallback" in kinds)

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; empty for special tokens, and for padding rows of the embedding."""
        return [self._bytes.get(token, b"") for token in token_ids]

    def name(self, token_id: int) -> str:
        """The name of an added token; empty for padding rows of the embedding."""
        return self._names.get(token_id, "")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def vocabulary_of(tokenizer: Any | None) -> TokenizerVocabulary | None:
    """None for a checkpoint without a tokenizer."""
    return None if tokenizer is None else TokenizerVocabulary(tokenizer)


def _bytes_of(token: str, table: dict[str, int] | None, spaces: dict[str, str], *, fallback: bool) -> bytes:
    if table is not None and all(letter in table for letter in token):
        return bytes(table[letter] for letter in token)
    if fallback and (byte := _BYTE.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    for written, meant in spaces.items():
        token = token.replace(written, meant)
    return token.encode()


def _decoders(tokenizer: Any) -> Iterator[str]:
    """The decoder types of a fast tokenizer, sequences flattened; empty for other tokenizers."""
    if not tokenizer.is_fast:
        return
    waiting = [json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")]
    while waiting:
        decoder = waiting.pop()
        if decoder:
            yield decoder["type"]
            waiting += decoder.get("decoders", [])


_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tokenizer_config.json")


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None if it has none (it then accepts only `prompt_token_ids`)."""
    if not any((model_dir / name).is_file() for name in _FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(model_dir)
    # tokenizers raises bare exceptions, and the library any exception for a file in another format
    except Exception as error:
        check_objects(model_dir, _FILES)
        raise ConfigError(f"{model_dir}: the tokenizer cannot be read: {error}", field="model") from error


def tokenizer_for(ctx: LoadContext) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, for stage models that also run without one; None if the deployment loads none."""
    return None if ctx.skip_tokenizer_init else load_tokenizer(ctx.model_dir)


@dataclass(frozen=True, slots=True)
class MarkedTokenizer:
    """A tokenizer with one additional token, which marks positions in a text."""

    tokenizer: PreTrainedTokenizerBase
    mark: str
    """The mark's text, which is secret to this process."""
    token: int
    """The mark's id, which the model does not have."""


def marked_tokenizer(model_dir: Path) -> MarkedTokenizer | None:
    """The checkpoint's tokenizer with an added mark; None if it has none, or one that accepts no further token."""
    tokenizer = load_tokenizer(model_dir)
    if tokenizer is None:
        return None
    mark = f"<|prompt_embeds {secrets.token_hex(8)}|>"
    try:
        tokenizer.add_tokens([mark], special_tokens=True)
    except (NotImplementedError, AttributeError):  # other implementations (mistral-common)
        return None
    ids = tokenizer(f"a {mark}b", add_special_tokens=False)["input_ids"]
    token = tokenizer.convert_tokens_to_ids(mark)
    return MarkedTokenizer(tokenizer, mark, token) if ids.count(token) == 1 else None


def decode(tokenizer: PreTrainedTokenizerBase | None, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Detokenize; empty if the checkpoint has no tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
