"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fake_service import Live


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    """The official client of a file's own server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
