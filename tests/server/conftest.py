"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from calling_model import HERMES
from fake_service import FakeService, Live, live, speak


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    """A file's own server, unless it has another."""
    with live(FakeService()) as server:
        yield server


@pytest.fixture
def server(running: Live) -> Live:
    """The same, which has been asked nothing."""
    running.service.script = speak
    running.service.requests.clear()
    return running


@pytest.fixture
def calling(server: Live) -> Iterator[None]:
    """Its model thinks aloud and calls tools."""
    before, server.service.card.dialect = server.service.card.dialect, HERMES
    yield
    server.service.card.dialect = before


@pytest.fixture
def http(server: Live) -> Iterator[httpx.Client]:
    """Any client of a file's server, which has been asked nothing."""
    server.service.requests.clear()
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    """The official client of a file's own server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
