"""What the tokens of a checkpoint's tokenizer say, byte by byte.

Three ways of writing bytes into a vocabulary are known: byte-level BPE (GPT-2's table of one printable character per
byte), byte fallback (SentencePiece: `▁` for a space, `<0x0A>` for a byte), and plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_level_table() -> dict[str, int]:
    """GPT-2's: printable characters of Latin-1 stand for themselves, other bytes for characters from 256 on."""
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
        """The bytes of each; empty for special tokens, and for rows of the embedding that no token has."""
        return [self._bytes.get(token, b"") for token in token_ids]

    def name(self, token_id: int) -> str:
        """What an added token is called; empty for rows that no token has."""
        return self._names.get(token_id, "")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with no special tokens around it."""
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
    """The kinds of decoders of a fast tokenizer, those within a sequence one by one; none for other tokenizers."""
    if not tokenizer.is_fast:
        return
    waiting = [json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")]
    while waiting:
        decoder = waiting.pop()
        if decoder:
            yield decoder["type"]
            waiting += decoder.get("decoders", [])
