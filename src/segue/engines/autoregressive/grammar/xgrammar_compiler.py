"""xgrammar for one vocabulary; rewords its errors for clients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from segue.engines.autoregressive.grammar.json_schema import culprit
from segue.engines.autoregressive.grammar.structural_tag import schemas_in
from segue.messages.errors import InvalidRequest

_WHERE = re.compile(r"^(\[[\d:]+\] )?(\S+\.(cc|cpp|h):\d+: )?(Check failed: \(.*?\) is \w+: )?")
"""Prefix of xgrammar's messages: time, source location, and the check that failed."""
_PLACE = re.compile(r"^EBNF (?:lexer|parser) error at (line \d+, column \d+): (.*)$", re.DOTALL)
_TYPES = "string, number, integer, boolean, null, array or object"

# (xgrammar's message, our message)
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"^Regex parsing error at position (\d+): (.*?)\.?$", r"at character \1 of its regular expression: \2"),
        (r"^Invalid structural tag error: (.*)$", r"\1"),
        (r"^Invalid JSON (?:schema )?error: (.*)$", r"\1"),
        (r"^Unsupported type (\".*\")$", rf"type is \1; it must be {_TYPES}"),
        (r"^Type should be a string$", f"type must be {_TYPES}, or a list of them"),
        (
            r"^Schema should be an object or bool, but got (.*)$",
            r"\1 is not a schema; it must be an object, true or false",
        ),
        (r"^Schema 'false' cannot accept any value$", "no value fits false"),
        (r"^Cannot find field .* in (#\S*)$", r"$ref is '\1', which does not exist in the schema"),
        (r"^Invalid range: .*$", "no number is within its bounds (minimum, maximum and the like)"),
        (r"^Value must be a number$", "its bounds (minimum, maximum and the like) must be numbers"),
        (r"^Integer constraint must be a whole number$", "bounds of an integer must be whole numbers"),
        (r"^Integer exceeds m\w+ limit$", "bounds of an integer must be of 64 bits"),
        (r"^Invalid repetition range (\{.*\})$", r"a length or a repetition of \1 is not possible"),
        (r"^Format type not recognized: (.*)$", r"there is no format of type '\1'"),
        (r"^(\w+) format('s)? ", r"the format \1\2 "),
    )
)


def in_our_words(kind: str, said: str) -> str:
    """Reword `said`, xgrammar's message for a source of this `kind`. Lines and columns of a grammar that xgrammar
    generated from another kind of source mean nothing to a client and are left out."""
    said = _WHERE.sub("", said.strip())
    if (found := _PLACE.match(said)) is not None:
        said = f"at {found[1]}: {found[2]}" if kind == "grammar" else found[2]
    for pattern, words in _WORDS:
        said = pattern.sub(words, said)
    return said


MAX_COMPILED_BYTES = 256 << 20
"""Limit for one compiled grammar, and the default limit of all cached ones."""


class XGrammar:
    """Compiles grammars, and loads those that another instance for the same vocabulary has compiled. Imports xgrammar
    on construction, because most workers never need it."""

    def __init__(self, words: Sequence[bytes], ends: Sequence[int]) -> None:
        """`words`: the bytes of every token; `ends`: tokens that end an output."""
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
        return [bytes(word) for word in self._info.decoded_vocab]  # the library may return a class of its own

    def __call__(self, kind: str, source: str) -> Any:
        """(kind, source) → `xgrammar.CompiledGrammar`. Raises `InvalidRequest` for errors in the source; its message
        continues a sentence that begins with the parameter's name."""
        ways: dict[str, Callable[[str], Any]] = {
            "json": self._compiler.compile_json_schema,
            "tight_json": lambda schema: self._compiler.compile_json_schema(schema, any_whitespace=False),
            "structural_tag": self._compiler.compile_structural_tag,
            "regex": self._compiler.compile_regex,
            "grammar": self._compiler.compile_grammar,
        }
        try:
            compiled = ways[kind](source)
        except (RuntimeError, ValueError) as error:  # xgrammar raises both for errors in the source
            if "bad_alloc" in str(error):
                raise MemoryError from error
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
        """`at PATH: ` of the part of a schema that causes the message `said`, if it is found."""
        if kind in ("json", "tight_json"):
            path = culprit(json.loads(source), self._refused)
            return f"at {path.removeprefix('.')}: " if path else ""
        if kind == "structural_tag":
            for at, schema in schemas_in(json.loads(source).get("format"), "format"):
                if self._refused(schema) == said:
                    return f"at {at}{culprit(schema, self._refused)}: "
        return ""

    def _refused(self, schema: Any) -> str | None:
        """Why a schema cannot be converted to a grammar; None if it can."""
        try:
            self._convert(json.dumps(schema, ensure_ascii=False))
        except (RuntimeError, ValueError) as error:
            return in_our_words("json", str(error))
        return None

    def serialized(self, kind: str, source: str) -> str:
        """Compile to text, for `deserialized` in another process."""
        return self(kind, source).serialize_json()

    def deserialized(self, text: str) -> Any:
        """Load the result of `serialized` as `xgrammar.CompiledGrammar`."""
        return self._deserialize(text, self._info)


def blank_mask(rows: int, vocab_size: int) -> torch.Tensor:
    """[rows, ceil(vocab_size / 32)] int32 that allows every token."""
    return torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)


def possible(matcher: Any, vocab_size: int) -> bool:
    """Whether any token is allowed next, according to an `xgrammar.GrammarMatcher`."""
    bitmask = blank_mask(1, vocab_size)
    matcher.fill_next_token_bitmask(bitmask, 0)
    return bool(bitmask.any())
