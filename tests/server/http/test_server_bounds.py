"""A bound on a list holds on every way that leads to the list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_service import FakeService, Live, live

from segue.messages.limits import RequestLimits

MOST = 8
WORDS = [{"type": "text", "text": "a"}] * (MOST + 1)
RESULT = {"type": "tool_result", "tool_use_id": "t"}
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    service = FakeService()
    service.card.limits = RequestLimits(max_parts=MOST, max_messages=MOST)
    with live(service) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "param", "limit"),
    [
        ("responses", {"input": [{"role": "user", "content": WORDS}]}, "input", "max_parts"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": WORDS}]}, "input",
         "max_parts"),
        ("messages", {"messages": [{"role": "user", "content": [{**RESULT, "content": WORDS}]}]}, "messages",
         "max_parts"),
        ("messages", {"messages": [{"role": "user", "content": [RESULT] * MOST}, USER]}, "messages",
         "max_messages"),
        ("messages", {"messages": [USER], "system": WORDS}, "messages", "max_parts"),
        ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * (MOST + 1)}]},
         "messages", "max_parts"),
        ("chat/completions", {"extra_body": {"messages": [USER] * (MOST + 1)}}, "messages", "max_messages"),
        ("chat/completions", {"messages": [USER], "extra_body": {"stop": ["a"] * 17}}, "stop", "max_stop_strings"),
    ],
)  # fmt: skip
def test_too_long_a_list_is_refused(server: Live, path: str, body: dict[str, Any], param: str, limit: str) -> None:
    more = {"max_tokens": 4} if path == "messages" else {}
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "fake-omni", **body, **more}, timeout=120)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert f"limits.{limit}" in error["message"]
    assert error["message"].startswith(f"{param} has ")
    assert error.get("param", param) == param


def test_a_long_conversation_that_is_kept_is_bounded_too(server: Live) -> None:
    asked = {"model": "fake-omni", "input": [USER] * (MOST - 1)}
    first = httpx.post(f"{server.url}/v1/responses", json=asked, timeout=120).json()
    asked["previous_response_id"] = first["id"]
    assert "limits.max_messages" in httpx.post(f"{server.url}/v1/responses", json=asked, timeout=120).text
