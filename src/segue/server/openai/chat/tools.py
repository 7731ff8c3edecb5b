"""`tools`, `tool_choice` and `parallel_tool_calls`: what the prompt shows, and what restricts the reply."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.messages.limits import check_carried
from segue.messages.sampling import StructuredOutput
from segue.models.shared.dialects.dialect import Dialect
from segue.models.shared.dialects.pieces import Parser, Plain
from segue.server.http.errors import Unsupported

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Most characters of a name: OpenAI allows 64, Anthropic 128."""
_CHOICES = ("none", "auto", "required")
_DEFINITIONS = ("$defs", "definitions")


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """Name, description and parameters of a function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    function: FunctionDefinition
    type: str = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that the model must call."""

    function: FunctionName
    type: str = "function"


@dataclass(frozen=True)
class ToolPlan:
    """The effect of a request's tools on its prompt, its sampling and the parsing of its reply."""

    shown: list[dict[str, Any]]
    """The tools as the client sent them, for the template."""
    names: frozenset[str] | None = None
    """Functions that the reply may call; None: none."""
    structured: StructuredOutput | None = None
    """The form of a reply that must call a tool."""
    schema_at: str = "tools"
    """The parameter that requires this form."""
    forced: str | None = None
    """The only tool that such a reply calls; None: any."""
    parallel: bool = True
    keeps_special_tokens: bool = False
    """The marks of a call are special tokens, so the text must keep them."""

    def parser(self, dialect: Dialect, *, opened: bool) -> Callable[[], Parser]:
        """A factory for the parser of one reply."""
        if self.structured is not None:
            return lambda: dialect.forced_parser(self.forced, opened=opened)
        if self.names is None and dialect.reasoning is None:
            return Plain
        return lambda: dialect.parser(opened=opened, tools=self.names)


def tool_plan(
    tools: list[Tool] | None,
    choice: str | NamedTool | None,
    parallel: bool | None,
    as_sent: Any,
    dialect: Dialect,
) -> ToolPlan:
    """Check the three parameters. Raises `InvalidRequest`, or `Unsupported` if this model takes no tools."""
    given = _checked(tools or [])
    if isinstance(choice, str) and choice not in _CHOICES:
        raise InvalidRequest(
            f"tool_choice is {shown(choice)}{nearest(choice, _CHOICES)}; or an object that names a function",
            field="tool_choice",
        )
    if not given:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is given, but tools is missing or empty", field="tool_choice")
        return ToolPlan([])
    if choice == "none":
        return ToolPlan([])
    if not dialect.takes_tools:
        raise Unsupported(
            "tools are given, but the chat template of this model does not support them; this server does not support "
            "that: leave them out",
            field="tools",
        )
    check_carried(as_sent, "tools")
    several = parallel is not False
    names = frozenset(given)
    if isinstance(choice, NamedTool):
        only, place = _only(choice, given), f"tools[{[*given].index(choice.function.name)}].function.parameters"
        return ToolPlan(as_sent, names, only, place, forced=choice.function.name, parallel=several)
    if choice == "required":
        return ToolPlan(as_sent, names, _any_of(given, several=several), parallel=several)
    if dialect.calls is None:
        raise Unsupported(
            "the format of this model's tool calls is not known; start the server with --tool-parser, or use "
            "tool_choice required",
            field="tools",
        )
    keeps = dialect.calls.marked_by_special_tokens
    return ToolPlan(as_sent, names, parallel=several, keeps_special_tokens=keeps)


def _checked(tools: list[Tool]) -> dict[str, FunctionDefinition]:
    given: dict[str, FunctionDefinition] = {}
    for index, tool in enumerate(tools):
        name, field = tool.function.name, f"tools[{index}]"
        if tool.type != "function":
            raise wrong(f"{field}.type", tool.type, "'function'")
        if not _NAME.fullmatch(name):
            right = "it must be 1 to 128 letters, digits, _, . or -"
            raise InvalidRequest(f"{field}.function.name is {shown(name)}; {right}", field=f"{field}.function.name")
        if name in given:
            raise InvalidRequest(
                f"{field}.function.name is {name!r}, which is used twice", field=f"{field}.function.name"
            )
        given[name] = tool.function
    return given


def _only(choice: NamedTool, given: dict[str, FunctionDefinition]) -> StructuredOutput:
    name, field = choice.function.name, "tool_choice.function.name"
    if name not in given:
        raise InvalidRequest(f"{field} is {shown(name)}, which is not one of tools{nearest(name, given)}", field=field)
    return StructuredOutput(json=_schema(given[name]))


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


def _any_of(given: dict[str, FunctionDefinition], *, several: bool) -> StructuredOutput:
    """An array of calls. Definitions that the schemas refer to (`#/$defs/…`) are at the root, so they move up."""
    root: dict[str, Any] = {}
    calls = []
    for index, (name, function) in enumerate(given.items()):
        schema = dict(_schema(function))
        for key in _DEFINITIONS:
            definitions = schema.pop(key, {})
            if not isinstance(definitions, dict):
                raise wrong(f"tools[{index}].function.parameters.{key}", definitions, "an object of schemas by name")
            for defined, what in definitions.items():
                if root.setdefault(key, {}).setdefault(defined, what) != what:
                    raise InvalidRequest(
                        f"tools: {key} of {name!r} defines {defined!r} differently from an earlier tool; "
                        "with tool_choice required the names must differ",
                        field="tools",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **root}
    if not several:
        schema["maxItems"] = 1
    return StructuredOutput(json=schema)
