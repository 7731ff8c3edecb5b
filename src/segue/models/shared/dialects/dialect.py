"""A checkpoint's format of tool calls and reasoning, detected from its chat template."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError, nearest
from segue.models.shared.dialects.array_of_calls import HeldCalls
from segue.models.shared.dialects.hermes import HermesParser
from segue.models.shared.dialects.llama import LlamaParser
from segue.models.shared.dialects.mistral import MistralParser
from segue.models.shared.dialects.pieces import CallArguments, CallBegun, Chain, Parser, Plain, ReplyPiece
from segue.models.shared.dialects.pythonic import PythonicParser
from segue.models.shared.dialects.reasoning import KNOWN as KNOWN_MARKS
from segue.models.shared.dialects.reasoning import ReasoningMarks, ReasoningParser
from segue.models.shared.text.chat_template import (
    ChatTemplate,
    read_chat_template,
    read_special_tokens,
    read_tokenizer_class,
)

_MISTRAL_ID = string.ascii_letters + string.digits


def _id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _mistral_id() -> str:
    """Nine letters or digits: Mistral's templates refuse other ids."""
    return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))


@dataclass(frozen=True)
class CallFormat:
    """One format of tool calls."""

    name: str
    parser: Callable[[Callable[[str], bool]], Parser]
    """Takes a predicate: whether a tool of this name exists."""
    marked_by_special_tokens: bool = False
    """Its markers are special tokens, so these must stay in the text."""
    call_id: Callable[[], str] = _id


CALL_FORMATS = {
    known.name: known
    for known in (
        CallFormat("hermes", lambda known: HermesParser()),
        CallFormat("llama3_json", LlamaParser, marked_by_special_tokens=True),
        CallFormat("mistral", lambda known: MistralParser(), marked_by_special_tokens=True, call_id=_mistral_id),
        CallFormat("pythonic", lambda known: PythonicParser(), marked_by_special_tokens=True),
    )
}
"""By the names of vLLM's `--tool-call-parser`."""


@dataclass(frozen=True)
class Dialect:
    """The server's knowledge of a model's output format."""

    template: ChatTemplate | None = None
    calls: CallFormat | None = None
    reasoning: ReasoningMarks | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()
    """`bos_token` and the like, those that the checkpoint names."""
    tokenizer_class: str | None = None
    """The tokenizer class of transformers that the checkpoint names."""

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return self.template is not None and self.template.has_tools

    @property
    def template_variables(self) -> frozenset[str]:
        return self.template.variables if self.template is not None else frozenset()

    def new_call_id(self) -> str:
        """A new id for a call, in the form that the template accepts."""
        return _id() if self.calls is None else self.calls.call_id()

    def with_calls(self, name: str) -> Dialect:
        """A copy with another call format, from `CALL_FORMATS`. Raises `ConfigError`."""
        if name not in CALL_FORMATS:
            raise ConfigError(f"there is no tool parser {name!r}{nearest(name, CALL_FORMATS)}", field="tool_parser")
        return replace(self, calls=CALL_FORMATS[name])

    def begins_in_thought(self, template_kwargs: dict[str, Any]) -> bool:
        """Whether the rendered prompt ends inside a thought."""
        if self.template is None or self.reasoning is None:
            return False
        beginning = self.template.reply_begins(template_kwargs)
        return beginning.rfind(self.reasoning.open) > beginning.rfind(self.reasoning.close)

    def parser(self, *, opened: bool, tools: frozenset[str] | None) -> Parser:
        """A parser for one reply. `opened`: the prompt ends inside a thought; `tools`: names of callable tools, None if
        calls are not allowed."""
        calls: Parser = Plain()
        if tools is not None and self.calls is not None:
            calls = self.calls.parser(tools.__contains__)
        return self._behind_thoughts(calls, opened=opened)

    def forced_parser(self, name: str | None, *, opened: bool) -> Parser:
        """A parser for a reply that a grammar forces to call this tool or, with None, any tool as an array of calls;
        after an optional thought."""
        return self._behind_thoughts(HeldCalls() if name is None else OneCall(name), opened=opened)

    def _behind_thoughts(self, rest: Parser, *, opened: bool) -> Parser:
        return rest if self.reasoning is None else Chain(ReasoningParser(self.reasoning, opened=opened), rest)


class OneCall:
    """A reply that consists only of one tool's arguments: a grammar forces this if the tool is fixed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[ReplyPiece]:
        text = text if self._begun else text.lstrip()
        if not text:
            return []
        begun: list[ReplyPiece] = [] if self._begun else [CallBegun(0, self._name)]
        self._begun = True
        return [*begun, CallArguments(0, text)]

    def finish(self) -> list[ReplyPiece]:
        return []


def dialect_of(model_dir: Path, config: dict[str, Any]) -> Dialect:
    """The dialect of a checkpoint, from how its template writes earlier turns; else from its `model_type`."""
    special = read_special_tokens(model_dir)
    tokenizer = read_tokenizer_class(model_dir)
    template = read_chat_template(model_dir, special)
    if template is None:
        return Dialect(special_tokens=special, tokenizer_class=tokenizer)
    marks = next((marks for marks in KNOWN_MARKS if marks.close in template.text), None)
    name = _call_format(template, str(config.get("model_type", ""))) if template.has_tools else None
    return Dialect(template, CALL_FORMATS[name] if name is not None else None, marks, special, tokenizer)


def _call_format(template: ChatTemplate, model_type: str) -> str | None:
    text = template.text
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<tool_call>" in text:
        # other families use XML or their own separators between the same markers
        return "hermes" if '"name' in text and "<function=" not in text and "<arg_key>" not in text else None
    if "<|python_start|>" in text or "[func_name1(" in text:
        return "pythonic"
    if "<|python_tag|>" in text or '"parameters": dictionary' in text:
        return "llama3_json"
    return {"mistral": "mistral", "mixtral": "mistral", "llama": "llama3_json"}.get(model_type)
