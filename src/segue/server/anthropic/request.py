"""Converts the body of `/v1/messages` (Anthropic's, with extensions) into a checked chat completion."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.orchestrator.service import ModelCard
from segue.server.anthropic.blocks import Turns, blocks_schema, turns_schema
from segue.server.generation.parameters import check_model, parse_body
from segue.server.http.body import check_names
from segue.server.http.errors import Unsupported
from segue.server.openai.chat.request import ChatRequest, as_chat
from segue.server.openai.chat.template import dialect_for, knows_effort
from segue.server.settings import ServerSettings

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_KEYS = (
    "type", "name", "description", "input_schema", "cache_control", "strict", "defer_loading", "allowed_callers",
    "eager_input_streaming", "input_examples",
)  # fmt: skip
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_THINKING = ("enabled", "adaptive", "disabled")


class CountBody(msgspec.Struct, kw_only=True):
    """The parameters that make the prompt. null means not given."""

    model: str
    messages: Annotated[list[Any], msgspec.Meta(extra_json_schema=turns_schema())]
    system: str | Annotated[list[Any], msgspec.Meta(extra_json_schema=blocks_schema("system"))] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # additional
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    # additional (and vLLM's)
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline: float | None = None
    """Seconds from now."""


_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "inference_geo": (),
}
"""Unsupported parameters of Anthropic's → values that have no effect (null always does)."""
_UNREAD = ("cache_control", "context_management", "betas")
"""Parameters that are accepted and ignored."""
_AS_IN_CHAT = ("temperature", "top_p", "top_k", "seed", "cache_salt", "priority", "deadline")
_WRITTEN = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "tool_choice.function.name": "tool_choice.name",
}
"""Name in the chat completion → name in the client's body; the most specific names first."""


@dataclass(frozen=True, kw_only=True)
class MessagesRequest:
    """A checked request: a chat completion of one choice."""

    message_id: str
    chat: ChatRequest
    stream: bool


def messages_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> MessagesRequest:
    """Check the body of a message. Blocking (media). Raises `InvalidRequest`."""
    body = parse_body(_read(values), MessagesBody, _UNSUPPORTED, {})
    user = (body.metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise wrong("metadata.user_id", user, "a string")
    given = msgspec.structs.asdict(body)
    more = {name: given[name] for name in _AS_IN_CHAT}
    more |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None, "user": user}
    return _checked(body, more, bool(body.stream), card, settings)


def count_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> MessagesRequest:
    """Check the body of a token count, which has only the parameters of the prompt."""
    return _checked(parse_body(_read(values), CountBody, _UNSUPPORTED, {}), {}, False, card, settings)


def _read(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _UNREAD}


def _checked(
    body: CountBody, more: dict[str, Any], stream: bool, card: ModelCard, settings: ServerSettings
) -> MessagesRequest:
    check_model(body.model, card, settings)
    if "text" not in card.gives:
        gives = ", ".join(sorted(card.gives))
        raise Unsupported(
            f"model {shown(body.model)} gives no text (it gives {gives}), so it cannot answer messages", field="model"
        )
    turns = Turns()
    if body.system:
        turns.system(body.system, "system")
    for index, turn in enumerate(body.messages):
        turns.turn(turn, f"messages[{index}]")
    messages = turns.messages
    tools, of_tools = _tools(body.tools or [])
    dialect = dialect_for(card, settings)
    values = {
        **more,
        "model": body.model,
        "modalities": ["text"],
        "messages": messages,
        "tools": tools or None,
        **_choice(body.tool_choice),
        **_thinking(body, knows_effort(dialect)),
        "thinking_token_budget": _budget(body) if dialect.reasoning is not None else None,
        "response_format": _response_format(body.output_config),
        "chat_template_kwargs": body.chat_template_kwargs,
        "continue_final_message": _goes_on(messages) or None,
    }
    message_id = f"msg_{uuid.uuid4().hex}"
    chat = as_chat(message_id, values, turns.written, {**of_tools, **_WRITTEN}, card, settings)
    for request in chat.requests:
        request.return_prompt_ids = True
    return MessagesRequest(message_id=message_id, chat=chat, stream=stream)


def _goes_on(messages: list[dict[str, Any]]) -> bool:
    """Whether the client has begun the reply."""
    return bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def _tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(tools of a chat completion, path in them → path in the client's body)."""
    given: list[dict[str, Any]] = []
    written: dict[str, str] = {}
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            raise Unsupported(
                f"{at}.type is {shown(tool['type'])}; this server runs no tools of its own: it must be custom, or left "
                "out",
                field=f"{at}.type",
            )
        check_names(tool, _TOOL_KEYS, at)
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        given.append({"type": "function", "function": function})
        written |= {f"{at}.function.parameters": f"{at}.input_schema", f"{at}.function": at}
    return given, written


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    """Convert to `tool_choice` and `parallel_tool_calls` of a chat completion."""
    if choice is None:
        return {}
    check_names(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use", False)
    if not isinstance(alone, bool):
        field = "tool_choice.disable_parallel_tool_use"
        raise wrong(field, alone, "true or false")
    parallel = {"parallel_tool_calls": False} if alone else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
    if not isinstance(kind, str) or kind not in _CHOICES:
        hint = nearest(kind, (*_CHOICES, "tool"))
        raise InvalidRequest(f"tool_choice.type is {shown(kind)}{hint}", field="tool_choice.type")
    return {"tool_choice": _CHOICES[kind], **parallel}


def _thinking(body: CountBody, has_levels: bool) -> dict[str, Any]:
    """How much the model should think, as far as its template can express it, and whether the client sees thoughts."""
    thinking, config = body.thinking or {}, body.output_config or {}
    check_names(thinking, ("type", "budget_tokens", "display"), "thinking")
    check_names(config, ("effort", "format"), "output_config")
    kind = thinking.get("type", None if body.thinking is None else "")
    if kind is not None and kind not in _THINKING:
        raise wrong("thinking.type", kind, ", ".join(_THINKING))
    effort = config.get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise InvalidRequest(
            f"output_config.effort is {shown(effort)}; known: {', '.join(_EFFORTS)}", field="output_config.effort"
        )
    seen = kind in ("enabled", "adaptive") and thinking.get("display") != "omitted"
    if kind == "disabled":
        level: str | None = "none"
    elif not has_levels:
        level = None
    else:
        level = "medium" if effort is None and kind is not None else _EFFORTS.get(effort or "")
    return {"include_reasoning": seen, "reasoning_effort": level}


def _budget(body: CountBody) -> int | None:
    """The limit on thought tokens, for a model with marked thoughts; None if there is none."""
    thinking = body.thinking or {}
    budget = thinking.get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise wrong("thinking.budget_tokens", budget, "an integer from 1")
    return None if thinking.get("type") != "enabled" else budget


def _response_format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise wrong("output_config.format", form, '{"type": "json_schema", "schema": …}')
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"]}}
