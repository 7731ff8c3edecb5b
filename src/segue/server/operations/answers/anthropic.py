"""Answers of Anthropic's messages."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class MessageBlock(TypedDict):
    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: NotRequired[int]
    cache_read_input_tokens: NotRequired[int]
    output_tokens: int


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """`type` determines the other keys."""

    type: str
    message: NotRequired[MessageAnswer]
    index: NotRequired[int]
    content_block: NotRequired[MessageBlock]
    delta: NotRequired[dict[str, str | None]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[dict[str, str]]


class CountedTokens(TypedDict):
    input_tokens: int
