"""Converts the body of `/v1/responses` (OpenAI's, with extensions) into a checked chat completion."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.messages.limits import check_carried
from segue.orchestrator.service import ModelCard
from segue.server.generation.parameters import check_model, parse_body, with_model
from segue.server.http.errors import Unsupported
from segue.server.openai.chat.request import ChatRequest, as_chat
from segue.server.openai.responses.items import Conversation, chat_tools, items_schema
from segue.server.settings import ServerSettings
from segue.server.vllm.parameters import VLLM_UNSUPPORTED

_MAX_TOP = 20
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""Allowed values of `include`. Thoughts are sent in plain text, so none are encrypted."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much the model should think."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """The required form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Additional contents of a stream."""

    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    model: str = ""
    input: str | Annotated[list[Any], msgspec.Meta(extra_json_schema=items_schema())]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    """The tenant, for fair scheduling."""
    prompt_cache_key: str | None = None
    session_id: str | None = None
    """Either names the session, for routing."""
    # additional (and vLLM's)
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline: float | None = None
    """Seconds from now."""
    options: dict[str, Any] | None = None


_FIELDS = ResponsesBody.__struct_fields__
_AS_IN_CHAT = ("model", "temperature", "top_p", "parallel_tool_calls", *_FIELDS[_FIELDS.index("user") :])
"""Parameters with the same names in a chat completion."""
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "moderation": (),
    "previous_input_messages": (),
    "enable_response_messages": (False,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    **VLLM_UNSUPPORTED,
}
"""Unsupported parameters of OpenAI's and vLLM's → values that have no effect (null always does)."""
_NESTED: dict[str, type[msgspec.Struct]] = {
    "reasoning": ReasoningOptions,
    "text": TextOptions,
    "stream_options": ResponseStreamOptions,
}
_WRITTEN = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "messages": "input",
}
"""Name in the chat completion → name in the client's body; the most specific names first."""


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest:
    """A checked request: a chat completion of one choice, and the answer's echoed fields."""

    response_id: str
    chat: ChatRequest
    stream: bool
    store: bool
    background: bool
    items: bytes
    """The input, as a JSON list of items."""
    asked: dict[str, Any]
    """Fields of the answer that repeat the request's parameters."""


def responses_request(
    values: dict[str, Any], earlier: list[Any], card: ModelCard, settings: ServerSettings
) -> ResponsesRequest:
    """Check the body. `earlier`: the items of the conversation so far. Blocking (media). Raises `InvalidRequest`."""
    body = parse_body(with_model(values, card, settings), ResponsesBody, _UNSUPPORTED, _NESTED)
    check_model(body.model, card, settings)
    if "text" not in card.gives:
        gives = ", ".join(sorted(card.gives))
        raise Unsupported(
            f"model {shown(body.model)} gives no text (it gives {gives}), so it cannot make responses", field="model"
        )
    _check(body)
    asked = _asked(body)
    for name, value in (*asked.items(), ("input", body.input)):
        check_carried(value, name)
    items = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not items and not earlier:
        raise InvalidRequest("input is empty; give a text or at least one item", field="input")
    conversation = Conversation()
    if body.instructions is not None:
        conversation.system(body.instructions, "instructions")
    for item in earlier:
        conversation.item(item, "previous_response_id")
    if isinstance(body.input, str):
        conversation.user(body.input, "input")
    else:
        for index, item in enumerate(items):
            conversation.item(item, f"input[{index}]")
    tools, of_tools = chat_tools(body.tools, body.tool_choice)
    response_id = f"resp_{uuid.uuid4().hex}"
    values = _chat_values(body, conversation, tools)
    return ResponsesRequest(
        response_id=response_id,
        chat=as_chat(response_id, values, conversation.written, {**of_tools, **_WRITTEN}, card, settings),
        stream=bool(body.stream),
        store=body.store is not False,
        background=bool(body.background),
        items=msgspec.json.encode(items),
        asked=asked,
    )


def _check(body: ResponsesBody) -> None:
    for index, name in enumerate(body.include or []):
        if name not in _INCLUDED:
            raise Unsupported(
                f"include[{index}] is {shown(name)}; this server does not support that{nearest(name, _INCLUDED)}",
                field=f"include[{index}]",
            )
    if body.background and body.store is False:
        raise InvalidRequest(
            "background is True and store False, but background responses are always stored: leave one out",
            field="store",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given, but stream is not true", field="stream_options")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise Unsupported(
            f"text.verbosity is {shown(body.text.verbosity)}; this server does not support that: leave it out",
            field="text.verbosity",
        )
    asked = body.reasoning or ReasoningOptions()
    for name, wanted in (("summary", asked.summary), ("generate_summary", asked.generate_summary)):
        if wanted not in (None, "auto"):
            raise Unsupported(
                f"reasoning.{name} is {shown(wanted)}; thoughts are returned whole, not summarised: leave it out",
                field=f"reasoning.{name}",
            )


def _chat_values(body: ResponsesBody, conversation: Conversation, tools: dict[str, Any]) -> dict[str, Any]:
    """The body of the equivalent chat completion."""
    given = msgspec.structs.asdict(body)
    values: dict[str, Any] = {name: given[name] for name in _AS_IN_CHAT}
    values |= {"messages": conversation.messages, "max_completion_tokens": body.max_output_tokens, **tools}
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= _MAX_TOP:
        raise wrong("top_logprobs", body.top_logprobs, f"from 0 to {_MAX_TOP}")
    if body.top_logprobs is not None or _LOGPROBS in (body.include or []):
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.reasoning is not None:
        values["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        values["response_format"] = _response_format(body.text.format)
    return values


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    """Convert `text.format`; a chat completion nests the schema one level deeper."""
    if form.get("type") != "json_schema":
        return form
    if not isinstance(form.get("schema"), dict):
        raise wrong("text.format.schema", form.get("schema"), "an object")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


def _asked(body: ResponsesBody) -> dict[str, Any]:
    form = (body.text.format if body.text is not None else None) or {"type": "text"}
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
