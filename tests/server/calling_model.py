"""A model that thinks aloud and calls tools: what it says, in the words of one dialect, and what it was told."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fake_service import Live, finished

from segue.messages.deltas import Delta, TextDelta
from segue.messages.request import Request, TextPart
from segue.models.shared.dialects.dialect import CALL_FORMATS, Dialect
from segue.models.shared.dialects.reasoning import THINK
from segue.models.shared.text.chat_template import ChatTemplate

TEMPLATE = ChatTemplate("{{ tools }}{{ enable_thinking }}{% if add_generation_prompt %}<|assistant|>{% endif %}")
HERMES = Dialect(TEMPLATE, CALL_FORMATS["hermes"], THINK)
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)
"""Two of them, in HERMES."""
THOUGHT_AND_CALLS = "<think>\nHm.\n</think>\n\n" + CALLS


def function(name: str, **parameters: Any) -> Any:
    """A tool, as `/v1/responses` has it."""
    return {"type": "function", "name": name, "parameters": {"type": "object", **parameters}, "strict": False}


LOOK = function("look", properties={"at": {"type": "string"}}, required=["at"])
WAIT = function("wait")


def says(text: str, size: int = 3, reason: str = "stop") -> Any:
    """A script that says this in pieces of some letters."""

    async def script(request: Request) -> AsyncGenerator[Delta]:
        for start in range(0, len(text), size):
            yield TextDelta("thinker", text[start : start + size], [start])
        yield finished(reason)

    return script


def told(server: Live) -> list[tuple[str, str]]:
    """(role, text) of the last request's messages."""
    return [
        (message.role, "".join(part.text for part in message.content if isinstance(part, TextPart)))
        for message in server.service.requests[-1].messages
    ]
