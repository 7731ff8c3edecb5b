"""Web pages of other sites: what their browsers are told (CORS)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_service import FakeService, Live, live

from segue.server.settings import ServerSettings

SITE = "https://app.example.org"
URL = "/v1/chat/completions"
BODY = {"model": "fake-omni", "messages": [{"role": "user", "content": "x"}]}
ASKS_WHETHER = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def open_to_site() -> Iterator[Live]:
    settings = ServerSettings(drain_seconds=1, api_key="secret", allow_origins=frozenset({SITE}))
    with live(FakeService(), settings) as server:
        yield server


def test_a_page_that_is_let_in(open_to_site: Live) -> None:
    with httpx.Client(base_url=open_to_site.url, headers={"Origin": SITE}, timeout=120) as page:
        asked = page.options(URL, headers=ASKS_WHETHER)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == SITE
        assert "authorization" in asked.headers["access-control-allow-headers"]
        answer = page.post(URL, json=BODY, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == SITE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = page.post(URL, json=BODY)  # which the page may read, too
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, SITE)


def test_other_pages_are_not(open_to_site: Live) -> None:
    with httpx.Client(base_url=open_to_site.url, headers={"Origin": "https://other.example"}, timeout=120) as page:
        assert page.options(URL, headers=ASKS_WHETHER).status_code == 400
        answer = page.post(URL, json=BODY, headers={"Authorization": "Bearer secret"})
        assert "access-control-allow-origin" not in answer.headers


def test_no_page_is_where_nothing_is_said(server: Live, http: httpx.Client) -> None:
    asked = http.options(URL, headers={"Origin": SITE, **ASKS_WHETHER})
    assert "access-control-allow-origin" not in asked.headers
