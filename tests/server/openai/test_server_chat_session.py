"""The websocket `/v1/chat/completions/stream`: chunks of a completion that is appended to, and what it refuses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import pytest
from fake_service import FakeService, Live, finished, live
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from segue.messages.deltas import Delta, TextDelta, TurnEnded
from segue.messages.request import Request, TextPart
from segue.messages.tensors import TensorSpec
from segue.server.settings import ServerSettings

CONFIG = {"type": "session.config", "messages": [{"role": "user", "content": "one"}]}
STALL = 1.0


async def echo(request: Request) -> AsyncGenerator[Delta]:
    """Each piece in capitals, as a reply of its own."""
    [part] = request.messages[0].content
    assert isinstance(part, TextPart)
    yield TextDelta("thinker", part.text.upper(), [5])
    yield TurnEnded("thinker", "stop")
    yield finished()


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    service = FakeService(echo)
    spec = TensorSpec("actions", "float32", (2,), tokens=1, most=2)
    service.card = msgspec.structs.replace(
        service.card, appends=True, tensors={"actions": spec}, takes=service.card.takes | {"actions"}
    )
    with live(service, ServerSettings(stall_seconds=STALL)) as server:
        yield server


@pytest.fixture(autouse=True)
def scripted(server: Live) -> None:
    server.service.script = echo


def opened(server: Live) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/v1/chat/completions/stream"
    return connect(url, max_size=None, open_timeout=120, close_timeout=1, proxy=None)


def append(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "input.append", "content": content, **more}


def actions(*data: Any) -> dict[str, Any]:
    return {"type": "tensor", "name": "actions", "data": list(data)}


def talk(server: Live, *messages: dict[str, Any]) -> tuple[list[dict[str, Any]], int | None]:
    """What the server sends, and the code that it closes with."""
    with opened(server) as client:
        for message in messages:
            client.send(json.dumps(message))
        answers = []
        while True:
            try:
                answers.append(json.loads(client.recv(timeout=60)))
            except ConnectionClosed as closed:
                return answers, closed.rcvd.code if closed.rcvd else None


def test_what_is_appended_is_answered_in_chunks(server: Live) -> None:
    several = append(["three", {"type": "text", "text": "four"}])
    answers, code = talk(server, CONFIG, append("two", reply=True), several, {"type": "input.done"})
    choices = [answer["choices"][0] for answer in answers]
    assert {answer["object"] for answer in answers} == {"chat.completion.chunk"}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "ONETWOTHREEFOUR"
    assert [choice["turn_ended"] for choice in choices if "turn_ended" in choice] == [
        {"finish_reason": "stop", "stop_reason": None}
    ] * 4
    assert ([choice["finish_reason"] for choice in choices if choice["finish_reason"]], code) == (["stop"], 1000)
    assert server.service.requests[-1].modalities == ["text"]


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        (append([actions(1.0, 2.0, 3.0)]), "content[0].shape", "is [3]; of actions it must be [2]"),
        (append(["lost", actions(1.0, 2.0, 3.0)]), "content[1].shape", "is [3]"),
        (append([actions([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])]), "content[0]", "makes 3 items of actions"),
        (append([{"type": "tensor", "name": "acts", "data": [1.0]}]), "content[0].name", "did you mean 'actions'"),
        (append([{"type": "image_url", "image_url": {"url": "x"}}]), "content[0].type", "only text and tensors"),
        (append(""), "content", "at least one character"),
        (append([]), "content", "at least one part"),
        (append("a", reply=1), "reply", "true or false"),
        (append("a", now=True), "now", "unknown parameter 'now'"),
        ({"type": "input.apend"}, "type", "did you mean 'input.append'"),
        (CONFIG, "type", "came a second time"),
    ],
)
def test_a_wrong_message_is_named_and_changes_nothing(
    server: Live, message: dict[str, Any], field: str, says: str
) -> None:
    answers, code = talk(server, CONFIG, message, append([actions([1.0, 2.0], [1.0, 2.0])]), {"type": "input.done"})
    [error] = [answer for answer in answers if answer.get("type") == "error"]
    assert (error["error"]["param"], code) == (field, 1000)
    assert "LOST" not in str(answers), "it is appended whole or not at all"
    assert says in error["message"]


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        (append("two"), "type", "session.config in the first message"),
        ({**CONFIG, "n": 2}, "n", "1 if input is appended"),
        ({**CONFIG, "stream": False}, "stream", "left out"),
        ({**CONFIG, "temprature": 1}, "temprature", "temperature"),
        ({"type": "session.config"}, "messages", "messages is missing"),
    ],
)
def test_a_wrong_config_ends_the_session(server: Live, message: dict[str, Any], field: str, says: str) -> None:
    [error], code = talk(server, message)
    assert (error["error"]["param"], code) == (field, 1008)
    assert says in error["message"]


def test_nothing_comes_after_the_end(server: Live) -> None:
    with opened(server) as client:
        client.send(json.dumps(CONFIG))
        client.send(json.dumps({"type": "input.done"}))
        with contextlib.suppress(ConnectionClosed):  # the server may have been faster
            client.send(json.dumps(append("two")))
        answers = []
        while True:
            try:
                answers.append(json.loads(client.recv(timeout=60)))
            except ConnectionClosed:
                break
    assert "TWO" not in str(answers)


@pytest.mark.parametrize("messages", [(), (CONFIG,), (CONFIG, append("two", reply=True))])
def test_a_silent_client_is_let_go(server: Live, messages: tuple[dict[str, Any], ...]) -> None:
    answers, code = talk(server, *messages)
    assert answers[-1]["message"] == f"no message arrived for {STALL:g} seconds (stall_seconds)"
    assert code == 1008


def test_a_client_that_leaves_cancels_its_completion(server: Live) -> None:
    with opened(server) as client:
        client.send(json.dumps(CONFIG))
        client.recv(timeout=60)
    while server.service.cancelled.get(timeout=60) != server.service.requests[-1].request_id:
        pass  # an earlier test's
