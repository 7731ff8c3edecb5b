"""Inspect a checkpoint's chat template for the control plane: its variables, and how a reply begins. No torch here.

The input stage renders prompts, with the tokenizer; here the template is only inspected.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.files import read_object

_JINJA = "chat_template.jinja"
_JSON = ("chat_template.json", "tokenizer_config.json")
_OWN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
     "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "tokenize", "conversation",
     "return_dict", "return_tensors", "padding", "truncation", "max_length", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "processor_kwargs", "sanitize_control_tokens", "load_audio_from_video"}
)  # fmt: skip
"""Variables that a template gets from elsewhere, and arguments of `apply_chat_template` itself: requests must not set
them."""


class _Generation(Extension):
    """`{% generation %}` marks the model's own text, for training; it does not change the output."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text; if a checkpoint has several, the default one's."""

    text: str
    tokens: tuple[tuple[str, str], ...] = ()
    """`bos_token` and the like, which templates print."""

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that a request may set: all that the template reads and does not get from elsewhere."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self.text))) - _OWN

    @property
    def has_tools(self) -> bool:
        return "tools" in self.text

    def reply_begins(self, arguments: dict[str, Any]) -> str:
        """The part of the reply that the template itself writes, e.g. `<|im_start|>assistant\\n<think>\\n`."""
        try:
            return _beginning(self, json.dumps(arguments, sort_keys=True))
        # the template refuses this conversation: the start is unknown
        except (jinja2.TemplateError, TypeError, ValueError):
            return ""


SpecialTokens = tuple[tuple[str, str], ...]
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_special_tokens(model_dir: Path) -> SpecialTokens:
    """(`eos_token`, its text) and the like, those that a checkpoint names. Raises `ConfigError`."""
    tokens = _object(model_dir / "tokenizer_config.json")
    return tuple(
        (name, token if isinstance(token, str) else str(token.get("content", "")))
        for name in SPECIAL_TOKENS
        if isinstance(token := tokens.get(name), str | dict)
    )


def read_tokenizer_class(model_dir: Path) -> str | None:
    """The tokenizer class of transformers that a checkpoint names. Raises `ConfigError`."""
    name = _object(model_dir / "tokenizer_config.json").get("tokenizer_class")
    return name if isinstance(name, str) else None


def read_chat_template(model_dir: Path, special: SpecialTokens = ()) -> ChatTemplate | None:
    """The template of a checkpoint, None if it has none. Raises `ConfigError` for an unreadable file or an invalid
    template."""
    path = model_dir / _JINJA
    if path.is_file():
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}", field="model") from error
        return ChatTemplate(_compiling(text, str(path)), special)
    for name in _JSON:
        where = f"{model_dir / name}: chat_template"
        found = _default(_object(model_dir / name).get("chat_template"), where)
        if found is not None:
            return ChatTemplate(_compiling(found, where), special)
    return None


def _compiling(text: str, where: str) -> str:
    """The text of a template, after compiling it. Raises `ConfigError` naming `where`."""
    try:
        _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        lines = text.splitlines()
        said = f" ({lines[error.lineno - 1].strip()[:100]!r})" if 0 < error.lineno <= len(lines) else ""
        raise ConfigError(
            f"{where}: line {error.lineno}{said}: {error.message}; it must be a Jinja template", field="model"
        ) from error
    return text


@lru_cache(maxsize=16)
def goes_through_parts(text: str) -> bool:
    """Whether a template also accepts message content in parts (`{% for part in message.content %}`)."""
    return any(_is_content(loop.iter) for loop in _environment().parse(text).find_all(nodes.For))


def _is_content(expression: nodes.Node) -> bool:
    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    if isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Const):
        return bool(expression.arg.value == "content")
    return False


def chats(model_dir: Path) -> bool:
    """Whether the checkpoint has a chat template: then a bare string is a user message, else a prompt."""
    return read_chat_template(model_dir) is not None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path)


def _default(value: object, where: str) -> str | None:
    """A template, or the one named `default` in a list. Raises `ConfigError` naming `where`."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where} is {str(value)[:100]!r}; it must be text, a Jinja template", field="model")
    return value


@lru_cache(maxsize=64)
def _beginning(template: ChatTemplate, arguments: str) -> str:
    compiled = _environment().from_string(template.text)
    values = {**dict(template.tokens), **json.loads(arguments), "messages": [{"role": "user", "content": "?"}]}
    without = compiled.render(**values, add_generation_prompt=False)
    whole = compiled.render(**values, add_generation_prompt=True)
    return whole.removeprefix(without)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders templates (`utils.chat_template_utils`)."""

    def raise_exception(message: str) -> str:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
