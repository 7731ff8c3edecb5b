"""Answers of OpenAI's responses."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from segue.server.operations.answers.chat import TokenLogprob


class OutputPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


class OutputItem(TypedDict):
    """A message, a thought or a function call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: str
    role: NotRequired[Literal["assistant"]]
    summary: NotRequired[list[Any]]
    content: NotRequired[list[OutputPart]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class CodedError(TypedDict):
    code: str
    message: str


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(TypedDict):
    """Repeats the request's parameters."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    error: CodedError | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str
    user: str | None


class ResponseEvent(TypedDict):
    """`type` determines the other keys."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseAnswer]
    item: NotRequired[OutputItem]
    part: NotRequired[OutputPart]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(TypedDict):
    id: str
    object: str
    deleted: Literal[True]


class Listed(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
