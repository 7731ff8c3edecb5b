"""Arguments of the chat template, and whether a reply begins inside a thought."""

from __future__ import annotations

from typing import Any, Protocol

from segue.messages.errors import InvalidRequest, shown
from segue.messages.limits import check_carried
from segue.messages.request import ChatOptions, Message, TextPart
from segue.models.shared.dialects.dialect import Dialect
from segue.orchestrator.service import ModelCard
from segue.server.http.body import check_names
from segue.server.http.errors import Unsupported
from segue.server.openai.chat.tools import ToolPlan
from segue.server.settings import ServerSettings

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")
"""Names that templates use for switching thoughts on or off."""


class TemplateBody(Protocol):
    """The template parameters of a body."""

    reasoning_effort: str | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def dialect_for(card: ModelCard, settings: ServerSettings) -> Dialect:
    """The model's dialect, with the operator's settings applied."""
    return card.dialect if settings.tool_parser is None else card.dialect.with_calls(settings.tool_parser)


def chat_options(body: TemplateBody, dialect: Dialect, tools: ToolPlan) -> ChatOptions:
    """The template's options. Raises `InvalidRequest` for unknown or contradictory arguments."""
    given = body.chat_template_kwargs or {}
    check_names(given, dialect.template_variables, "chat_template_kwargs")
    check_carried(given, "chat_template_kwargs")
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both true: a reply continues the last message or "
            "is a new one",
            field="continue_final_message",
        )
    return ChatOptions(
        tools=tools.shown,
        add_generation_prompt=not goes_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=goes_on,
        template_kwargs={**_effort(body.reasoning_effort, dialect), **given},
    )


def knows_effort(dialect: Dialect) -> bool:
    """Whether the template has levels of thought, or a switch for it."""
    return any(name in dialect.template_variables for name in ("reasoning_effort", *_SWITCHES))


def _effort(effort: str | None, dialect: Dialect) -> dict[str, Any]:
    """`reasoning_effort` as the template's argument: one of its levels, or a switch."""
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        known = ", ".join(_EFFORTS)
        raise InvalidRequest(f"reasoning_effort is {shown(effort)}; known: {known}", field="reasoning_effort")
    if "reasoning_effort" in dialect.template_variables:
        return {"reasoning_effort": effort}
    for switch in _SWITCHES:
        if switch in dialect.template_variables:
            return {switch: effort != "none"}
    if effort == "none":
        return {}
    raise Unsupported(
        f"reasoning_effort is {shown(effort)}; this server does not support that, because the chat template has no "
        "levels of thought: leave it out or use 'none'",
        field="reasoning_effort",
    )


def begins_in_thought(messages: list[Message], options: ChatOptions, dialect: Dialect) -> bool:
    """Whether the reply continues a thought that the prompt has begun."""
    if dialect.reasoning is None or not messages:
        return False
    if options.add_generation_prompt:
        return dialect.begins_in_thought(options.template_kwargs)
    if not options.continue_final_message:
        return False
    text = "".join(part.text for part in messages[-1].content if isinstance(part, TextPart))
    return text.rfind(dialect.reasoning.open) > text.rfind(dialect.reasoning.close)
