"""xgrammar over a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from segue.engines.autoregressive.compiler_words import in_our_words
from segue.engines.autoregressive.json_schema import culprit
from segue.engines.autoregressive.structural_tag import schemas_in
from segue.messages.errors import InvalidRequest

MAX_COMPILED_BYTES = 256 << 20
"""Of one compiled grammar, and, where nothing else is said, of all that are kept for the next request."""


class XGrammar:
    """Compiles; and takes what another one for the same vocabulary has compiled. xgrammar is imported with the first of
    them: most workers never need it."""

    def __init__(self, words: Sequence[bytes], ends: Sequence[int]) -> None:
        """`words`: the bytes of every token; `ends`: those that end an output."""
        from xgrammar import CompiledGrammar, Grammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

        self._info = TokenizerInfo(list(words), VocabType.RAW, vocab_size=len(words), stop_token_ids=list(ends))
        self._compiler = GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._convert = Grammar.from_json_schema
        self._deserialize = CompiledGrammar.deserialize_json
        self._matcher = GrammarMatcher
        self._vocab_size = len(words)
        self.ends = list(ends)

    @property
    def words(self) -> list[bytes]:
        """The bytes of every token."""
        return [bytes(word) for word in self._info.decoded_vocab]  # what the library gives may be a class of its own

    def __call__(self, kind: str, source: str) -> Any:
        """(kind, source) → `xgrammar.CompiledGrammar`. Raises `InvalidRequest` for what is wrong with the source; what
        it says follows the name of the parameter."""
        ways: dict[str, Callable[[str], Any]] = {
            "json": self._compiler.compile_json_schema,
            "tight_json": lambda schema: self._compiler.compile_json_schema(schema, any_whitespace=False),
            "structural_tag": self._compiler.compile_structural_tag,
            "regex": self._compiler.compile_regex,
            "grammar": self._compiler.compile_grammar,
        }
        try:
            compiled = ways[kind](source)
        except (RuntimeError, ValueError) as error:  # both say what is wrong with the source
            said = in_our_words(kind, str(error))
            raise InvalidRequest(f"cannot be compiled: {self._place(kind, source, said)}{said}") from error
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            raise InvalidRequest(
                f"takes {compiled.memory_size_bytes} bytes when compiled; at most {MAX_COMPILED_BYTES} are allowed"
            )
        if not possible(self._matcher(compiled), self._vocab_size):
            raise InvalidRequest("matches no text that this model can write")
        return compiled

    def _place(self, kind: str, source: str, said: str) -> str:
        """`at PATH: ` of the part of a schema of which that is `said`, where it can be told."""
        if kind in ("json", "tight_json"):
            path = culprit(json.loads(source), self._refused)
            return f"at {path.removeprefix('.')}: " if path else ""
        if kind == "structural_tag":
            for at, schema in schemas_in(json.loads(source).get("format"), "format"):
                if self._refused(schema) == said:
                    return f"at {at}{culprit(schema, self._refused)}: "
        return ""

    def _refused(self, schema: Any) -> str | None:
        """Why a schema cannot be made into a grammar; None where it can."""
        try:
            self._convert(json.dumps(schema, ensure_ascii=False))
        except (RuntimeError, ValueError) as error:
            return in_our_words("json", str(error))
        return None

    def serialized(self, kind: str, source: str) -> str:
        """The same as text, for `deserialized` in another process."""
        return self(kind, source).serialize_json()

    def deserialized(self, text: str) -> Any:
        """What `serialized` gave, as `xgrammar.CompiledGrammar`."""
        return self._deserialize(text, self._info)


def blank_mask(rows: int, vocab_size: int) -> torch.Tensor:
    """[rows, ceil(vocab_size / 32)] int32 that forbids nothing."""
    return torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)


def possible(matcher: Any, vocab_size: int) -> bool:
    """Some token may come next, by an `xgrammar.GrammarMatcher`."""
    bitmask = blank_mask(1, vocab_size)
    matcher.fill_next_token_bitmask(bitmask, 0)
    return bool(bitmask.any())
