"""`tools` and `tool_choice` of the Responses API as those of a chat completion."""

from __future__ import annotations

from typing import Any

from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.server.body import check_names
from segue.server.errors import Unsupported

_PASSED = ("name", "description", "parameters", "strict")
_TOOL_KEYS = ("type", *_PASSED, "output_schema", "allowed_callers", "defer_loading")


def chat_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """(the parameters of a chat completion, where in them → where in the client's).

    Raises `InvalidRequest`; `Unsupported` for tools that OpenAI runs itself.
    """
    given = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    places = list(range(len(given)))
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            places = _allowed(choice, [tool["function"].get("name") for tool in given])
            given = [given[index] for index in places]
            choice = str(choice.get("mode", "auto"))
        elif kind == "function":
            check_names(choice, ("type", "name"), "tool_choice")
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            raise Unsupported(
                f"tool_choice.type is {shown(kind)}; this server has function and allowed_tools",
                field="tool_choice.type",
            )
    written: dict[str, str] = {}
    for shown_at, index in enumerate(places):
        written |= {f"tools[{shown_at}].function": f"tools[{index}]", f"tools[{shown_at}]": f"tools[{index}]"}
    return {"tools": given or None, "tool_choice": choice}, written


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise Unsupported(
            f"{at}.type is {shown(kind)}; this server runs no tools of its own: of the tools, functions are taken",
            field=f"{at}.type",
        )
    check_names(tool, _TOOL_KEYS, at)
    return {"type": "function", "function": {name: tool[name] for name in _PASSED if tool.get(name) is not None}}


def _allowed(choice: dict[str, Any], known: list[Any]) -> list[int]:
    """Places of the tools that `allowed_tools` names."""
    check_names(choice, ("type", "mode", "tools"), "tool_choice")
    if choice.get("mode") not in ("auto", "required"):
        raise wrong("tool_choice.mode", choice.get("mode"), "auto or required")
    tools = choice.get("tools")
    if not isinstance(tools, list) or not tools:
        raise wrong("tool_choice.tools", tools, "a list of tools, at least one")
    places = []
    for index, tool in enumerate(tools):
        name, at = tool.get("name") if isinstance(tool, dict) else None, f"tool_choice.tools[{index}]"
        if name not in known:
            hint = nearest(name, known) if isinstance(name, str) else ""
            raise InvalidRequest(f"{at} is {shown(tool)}, which tools has not{hint}", field=at)
        places.append(known.index(name))
    return sorted(set(places))
