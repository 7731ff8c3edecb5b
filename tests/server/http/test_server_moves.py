"""Moves of workers over HTTP: for operators, where the server allows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_service import FakeService, Live, live

from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import Tenant, digest

PATH = "/v1/move_worker"
BODY = {"from_stage": "talker", "to_stage": "vocoder"}
TENANTS = (
    Tenant(name="alice", digests=(digest("key-of-alice"),), operator=True),
    Tenant(name="bob", digests=(digest("key-of-bob"),)),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeService(), ServerSettings(allow_moves=True, tenants=TENANTS, drain_seconds=1)) as server:
        yield server


def asked(server: Live, body: dict[str, Any], key: str = "key-of-alice") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}{PATH}", json=body, headers=headers, timeout=120)


def test_an_operator_moves_a_worker(server: Live) -> None:
    answer = asked(server, BODY)
    assert answer.status_code == 200
    assert answer.json() == {**BODY, "worker": "vocoder.1-1", "seconds": 0.5}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"from_stage": "talker", "to_stage": "talker"}, "from_stage"),
        ({"from_stage": "talker"}, "to_stage"),
        ({**BODY, "from_stage": 3}, "from_stage"),
        ({**BODY, "to_stag": "x"}, "to_stag"),
    ],
)
def test_mistakes_are_named(server: Live, body: dict[str, Any], param: str) -> None:
    answer = asked(server, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_others_move_nothing(server: Live) -> None:
    answer = asked(server, BODY, "key-of-bob")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert asked(server, BODY, "no-key").status_code == 401


def test_a_server_that_does_not_allow_it_says_how_it_would() -> None:
    with live(FakeService(), ServerSettings(drain_seconds=1)) as server:
        answer = asked(server, BODY)
    assert answer.status_code == 400
    assert "--allow-moves" in answer.json()["error"]["message"]
