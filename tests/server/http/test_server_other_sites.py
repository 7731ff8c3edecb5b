"""Web pages of other sites: what is refused of them, and what their browsers are told (CORS)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_service import FakeService, Live, live

from segue.server.http.sites import Sites, host_name
from segue.server.settings import ServerSettings

SITE = "https://app.example.org"
URL = "/v1/chat/completions"
BODY = {"model": "fake-omni", "messages": [{"role": "user", "content": "x"}]}
ASKS_WHETHER = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def open_to_site() -> Iterator[Live]:
    settings = ServerSettings(
        drain_seconds=1,
        api_key="secret",
        allow_origins=frozenset({SITE}),
        allowed_hosts=frozenset({"ai.example.org", "*.example.net"}),
    )
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
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    assert not open_to_site.service.requests or open_to_site.service.requests[-1].messages


def test_with_any_origin_allowed_no_page_is_refused() -> None:
    with live(FakeService(), ServerSettings(drain_seconds=1, allow_origins=frozenset({"*"}))) as server:
        for origin in ("https://other.example", "null"):
            answer = httpx.post(server.url + URL, json=BODY, headers={"Origin": origin}, timeout=120)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


CROSS_SITE: list[dict[str, str]] = [
    {"Origin": SITE},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},  # another port is another site
    {"Origin": "http://127.0.0.1"},
    {"Origin": "http://"},
    {"Origin": "http://["},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", CROSS_SITE, ids=str)
def test_pages_of_other_sites_are_refused(server: Live, http: httpx.Client, headers: dict[str, str]) -> None:
    form = {"data": {"prompt": "x"}, "files": {"image": ("a.png", b"x")}}
    answers = [
        http.post(URL, json=BODY, headers=headers),
        http.post("/v1/images/edits", headers=headers, **form),  # type: ignore[arg-type]
        http.post("/v1/responses/resp_1/cancel", headers=headers),  # has no body, so no Content-Type to ask before
        http.delete("/v1/responses/resp_1", headers=headers),
        http.get("/v1/responses/resp_1", headers=headers),
        http.get("/metrics", headers=headers),
        http.options(URL, headers={**headers, **ASKS_WHETHER}),
    ]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(403, "cross_site")}
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)
    assert server.service.requests == []


def test_pages_of_this_server_and_programs_are_answered(server: Live, http: httpx.Client) -> None:
    port = server.port
    for headers in (
        {},
        {"Origin": server.url, "Sec-Fetch-Site": "same-origin"},
        {"Origin": server.url},  # over plain HTTP to another machine, browsers say no more
        {"Origin": f"http://LOCALHOST:{port}", "Host": f"localhost:{port}"},
        # behind a proxy that speaks TLS and writes a Host of its own
        {"Origin": "https://ai.example.org", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert http.post(URL, json=BODY, headers=headers).status_code == 200, headers
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert http.get("/", headers=link).status_code == 200
    assert http.post(URL, json=BODY, headers=link).status_code == 403


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b"]
)
def test_what_a_form_of_any_page_may_send_is_no_json(server: Live, http: httpx.Client, kind: str | None) -> None:
    body = b'{"model": "fake-omni", "messages": [{"role": "user", "content": "x"}]}'
    for path in (URL, "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/v1/images/generations"):
        answer = http.post(path, content=body, headers={} if kind is None else {"Content-Type": kind})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (415, "unsupported_media_type")
        assert ("is missing" if kind is None else kind.partition(";")[0]) in error["message"]
    assert server.service.requests == []


def test_a_name_that_was_made_to_resolve_to_this_machine_is_refused(server: Live, http: httpx.Client) -> None:
    rebound = {"Host": f"evil.example:{server.port}"}
    page = {**rebound, "Origin": f"http://evil.example:{server.port}", "Sec-Fetch-Site": "same-origin"}
    for answer in (http.post(URL, json=BODY, headers=page), http.get("/health", headers=rebound)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host")
        assert "--allowed-host evil.example" in answer.json()["error"]["message"]
    assert server.service.requests == []


def test_names_that_the_operator_adds_are_answered(open_to_site: Live) -> None:
    def status(host: str) -> int:
        return httpx.get(f"{open_to_site.url}/health", headers={"Host": host}, timeout=120).status_code

    assert {status(host) for host in ("ai.example.org", "AI.example.org.:443", "a.b.example.net")} == {200}
    assert {status(host) for host in ("example.org", "b.ai.example.org", "example.net", "evilexample.net")} == {421}


@pytest.mark.parametrize(
    ("host", "named", "answered"),
    [
        ("127.0.0.1", ["localhost:1", "a.localhost", "127.0.0.1:80", "[::1]:80", "10.1.2.3:8000", "[fe80::1]"], True),
        (
            "127.0.0.1",
            ["evil.example", "segue", "segue.local", "localhost.evil.example", "127.0.0.1.evil.example"],
            False,
        ),
        # a service of a container or a cluster goes by names that public DNS does not have
        ("0.0.0.0", ["10.1.2.3:8000", "segue:8000", "segue.ns.svc.cluster.local", "host.docker.internal"], True),
        ("::", ["evil.example", "segue.evil.example", "local", "x.locals"], None),
        ("ai.example.org", ["ai.example.org", "AI.EXAMPLE.ORG:8000"], True),
    ],
)
def test_hosts_by_the_address_listened_on(host: str, named: list[str], answered: bool | None) -> None:
    sites = Sites(ServerSettings(host=host))
    wanted = {name: "." not in host_name(name) if answered is None else answered for name in named}
    assert {name: sites.serves(host_name(name)) for name in named} == wanted
