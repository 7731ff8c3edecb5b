"""Models, voices, health, metrics, the page; ids, keys and unknown routes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from html.parser import HTMLParser
from importlib.metadata import version

import httpx
import openai
import pytest
from fake_service import FakeService, Gate, Live, finished, live, sent, speak
from prometheus_client.parser import text_string_to_metric_families

from segue.messages.deltas import Delta
from segue.messages.request import Request
from segue.observe.logging import configure_logging
from segue.orchestrator.service import Health, ReplicaHealth, StageHealth
from segue.server.http.middleware import OPEN
from segue.server.settings import ServerSettings

HELLO = [{"role": "user", "content": "Say hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeService()) as server:
        yield server


@pytest.fixture
def http(server: Live) -> Iterator[httpx.Client]:
    server.service.script = speak
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def test_models_as_the_official_client_reads_them(server: Live) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        [model] = client.models.list().data
        assert (model.id, model.object, model.owned_by, model.created) == ("fake-omni", "model", "segue", 1_700_000_000)
        assert client.models.retrieve("fake-omni") == model
        with pytest.raises(openai.NotFoundError, match="did you mean 'fake-omni'"):
            client.models.retrieve("fake-omny")


def test_a_model_name_may_be_a_path() -> None:
    settings = ServerSettings(served_names=("org/model",))
    with live(FakeService(), settings) as server:
        assert httpx.get(f"{server.url}/v1/models/org/model", timeout=120).json()["id"] == "org/model"


def test_voices(http: httpx.Client) -> None:
    answer = http.get("/v1/audio/voices").json()
    assert (answer["voices"], answer["default"]) == (["Anna", "Ben"], "Anna")
    assert "pcm16" in answer["formats"]


def test_health_follows_the_stages(server: Live, http: httpx.Client) -> None:
    ready = server.service.state
    answer = http.get("/health")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["ready"], body["model"]) == (True, "fake-omni")
    assert body["stages"]["talker"] == {
        "state": "ready", "replicas": [{"pid": 101, "state": "ready", "restarts": 0, "loading": 0.0}],
    }  # fmt: skip
    starting = StageHealth("starting", [ReplicaHealth(None, "starting", 2, 0.4)])
    server.service.state = Health(False, {**ready.stages, "talker": starting})
    answer = http.get("/health")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
    assert answer.json()["stages"]["talker"]["state"] == "starting"
    assert answer.json()["stages"]["talker"]["replicas"][0]["loading"] == 0.4
    assert http.get("/ping").json() == answer.json()
    server.service.state = ready
    assert http.get("/health").status_code == http.get("/ping").status_code == 200


def test_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version("segue")}


def test_metrics_count_requests_and_time_generations() -> None:
    with live(FakeService()) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        for body in ({}, {"stream": True, "modalities": ["text", "audio"]}, {"n": 2}, {"temperature": 9}):
            http.post(CHAT, json={"model": "fake-omni", "messages": HELLO, **body})
        http.get("/nowhere")
        http.get("/elsewhere")
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
    assert samples["segue_http_requests_total", "/v1/chat/completions", "200", "POST"] == 3
    assert samples["segue_http_requests_total", "/v1/chat/completions", "400", "POST"] == 1
    assert samples["segue_http_requests_total", "404", "any", "none"] == 2
    assert samples["segue_http_requests_in_flight",] == 1, "this one"
    assert samples["segue_generations_in_flight",] == 0
    assert samples["segue_generations_total", "stop"] == 4
    assert samples["segue_ttft_seconds_count",] == 4
    assert samples["segue_ttfa_seconds_count",] == 1
    assert samples["segue_jct_seconds_count",] == 4
    assert samples["segue_itl_seconds_count",] == 8
    assert samples["segue_stage_waiting",] == 0, "the service's own are there too"


def test_a_client_that_left_counts_as_499() -> None:
    gate = Gate()

    async def hangs(request: Request) -> AsyncGenerator[Delta]:
        await gate.wait()
        yield finished()

    service = FakeService(hangs)
    with live(service) as server:
        sock = sent(server.port, CHAT, {"model": "fake-omni", "messages": HELLO})
        assert gate.reached.wait(120)
        sock.close()
        service.cancelled.get(timeout=120)
        left = 'segue_http_requests_total{endpoint="/v1/chat/completions",method="POST",status="499"} 1.0'
        while left not in (text := httpx.get(f"{server.url}/metrics", timeout=120).text):
            pass  # the service is told first
    assert 'segue_generations_total{end="aborted"} 1.0' in text


class _Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action") and value]


def test_the_page_loads_and_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = _Resources()
    page.feed(answer.text)
    assert [link for link in page.links if not link.startswith("data:")] == []
    assert {"form", "textarea", "select", "input", "button", "script", "style"} <= page.tags
    assert "v1/chat/completions" in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text


def test_unknown_routes_and_methods_are_answered_in_the_same_form(http: httpx.Client) -> None:
    missing = http.post("/v1/chat/completion", json={})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert "did you mean '/v1/chat/completions'" in missing.json()["error"]["message"]
    wrong = http.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert "takes POST, not GET" in wrong.json()["error"]["message"]
    both = http.put("/v1/responses/resp_1")
    assert (both.status_code, both.headers["allow"]) == (405, "DELETE, GET")
    assert "takes DELETE, GET, not PUT" in both.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("POST", "/v1/responses/compact", "OpenAI has /v1/responses/compact, this server does not: send /v1/responses"),
        ("POST", "/v1/conversations", "previous_response_id"),
        ("GET", "/v1/conversations/conv_1/items", "OpenAI has /v1/conversations, this server does not"),
        ("POST", "/v1/audio/voice_consents", "/v1/audio/voices"),
        ("POST", "/v1/files", "data: URLs"),
        ("GET", "/v1/files/file-1/content", "OpenAI has /v1/files,"),
        ("POST", "/v1/uploads", "data: URLs"),
        ("POST", "/v1/batches", "concurrently"),
        ("POST", "/v1/fine_tuning/jobs", "OpenAI has /v1/fine_tuning, this server does not"),
        ("POST", "/v1/assistants", "/v1/responses"),
        ("POST", "/v1/threads/runs", "/v1/responses"),
        ("POST", "/v1/moderations", "/v1/classify"),
        ("POST", "/v1/realtime/sessions", "input_audio"),
        ("POST", "/v1/vector_stores", "/v1/embeddings"),
        ("POST", "/v1/images/variations", "/v1/images/edits"),
    ],
)
def test_endpoints_of_others_are_refused_by_name(http: httpx.Client, method: str, path: str, says: str) -> None:
    answer = http.request(method, path, json={} if method == "POST" else None)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
    assert error["message"].startswith(f"no such endpoint: {method} {path}; OpenAI has ")
    assert says in error["message"]


def test_batches_of_messages_are_refused_in_their_own_form(http: httpx.Client) -> None:
    answer = http.post("/v1/messages/batches", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "Anthropic has /v1/messages/batches, this server does not" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/nowhere", CHAT])
def test_every_answer_has_a_request_id(http: httpx.Client, path: str) -> None:
    assert http.get(path, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("has space", "x" * 200, ""):
        assert http.get(path, headers={"X-Request-Id": bad}).headers["x-request-id"] != bad


def test_an_api_key_guards_all_but_what_is_open() -> None:
    with live(FakeService(), ServerSettings(api_key="s3cret")) as server:
        document = httpx.get(f"{server.url}/openapi.json", timeout=120).json()["paths"]
        asked = [(method, path) for path, operations in document.items() for method in operations]
        # those that no list has, too
        asked += [
            ("post", "/v1/videos/x/remix"),
            ("get", "/docs"),
            ("get", "/v1"),
            ("get", "//v1/models"),
            ("get", "/health/"),
        ]
        statuses = {
            (method, path): httpx.request(method, server.url + path, timeout=120).status_code for method, path in asked
        }
        open_paths = {path for (_, path), status in statuses.items() if status != 401}
        assert open_paths == OPEN
        assert len(statuses) > 40
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            answer = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=120)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in OPEN:
            assert httpx.get(server.url + path, timeout=120).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0) as client:
            assert client.chat.completions.create(model="fake-omni", messages=HELLO).choices  # type: ignore[arg-type]
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_the_access_log_has_a_line_per_request_with_its_id() -> None:
    lines = io.StringIO()
    configure_logging("info", as_json=True, stream=lines)
    try:
        with live(FakeService()) as server:
            httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "id-1"}, timeout=120)
            httpx.get(f"{server.url}/health", headers={"X-Request-Id": "a poll"}, timeout=120)
            httpx.post(f"{server.url}{CHAT}", json={}, headers={"X-Request-Id": "id-2"}, timeout=120)
    finally:
        for name in ("segue", "uvicorn.error"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [], True
            logger.setLevel(logging.NOTSET)
    events = [json.loads(line) for line in lines.getvalue().splitlines()]
    requests = {event["request_id"]: event for event in events if event["logger"] == "segue.access"}
    assert (requests["id-1"]["method"], requests["id-1"]["path"], requests["id-1"]["status"]) == (
        "GET",
        "/v1/models",
        200,
    )
    assert (requests["id-2"]["path"], requests["id-2"]["status"]) == (CHAT, 400)
    assert requests["id-2"]["seconds"] >= 0
    assert set(requests) == {"id-1", "id-2"}, "a health check every second is not worth a line each"
