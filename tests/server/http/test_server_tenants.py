"""API keys of several tenants: what is whose, within which limits, and how the keys are given."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import time
import traceback
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from fake_service import FakeService, Gate, Live, live, speak
from filmer import filmer
from video_jobs import created, ended, serving, until

from segue.cli.main import _keys, parser
from segue.messages.deltas import Delta, TextDelta
from segue.messages.errors import ConfigError, DeadlineExceeded
from segue.messages.request import Request
from segue.observe.logging import configure_logging
from segue.server.settings import ServerSettings
from segue.server.tenants.keys_file import read_keys
from segue.server.tenants.tenants import Bucket, Tenant, digest

CHAT = "/v1/chat/completions"
HELLO = {"model": "fake-omni", "messages": [{"role": "user", "content": "Hello"}]}
TENANTS = (
    Tenant(name="alice", digests=(digest("key-of-alice"), digest("her-next-key")), share=3.0, priority=True),
    Tenant(name="bob", digests=(digest("key-of-bob"),)),
    Tenant(name="single", digests=(digest("key-of-single"),), max_requests=1),
    Tenant(name="rare", digests=(digest("key-of-rare"),), requests_per_minute=2),
    Tenant(name="terse", digests=(digest("key-of-terse"),), tokens_per_minute=20),
    Tenant(name="hasty", digests=(digest("key-of-hasty"),), tokens_per_minute=50),
)


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    settings = ServerSettings(drain_seconds=1, tenants=TENANTS, allow_runtime_lora=True)
    service = FakeService()
    service.card.adapters["poet"] = "/srv/poet"
    with live(service, settings) as server:
        yield server


def client_with(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)


@pytest.fixture
def alice(server: Live) -> Iterator[httpx.Client]:
    with client_with(server.url, "key-of-alice") as client:
        yield client


@pytest.fixture
def bob(server: Live) -> Iterator[httpx.Client]:
    with client_with(server.url, "key-of-bob") as client:
        yield client


def test_the_key_says_whose_a_request_is(server: Live, alice: httpx.Client) -> None:
    asked = {**HELLO, "user": "bob", "priority": -5}
    assert alice.post(CHAT, json=asked).status_code == 200
    with client_with(server.url, "her-next-key") as also_alice:
        assert also_alice.post("/v1/completions", json={"prompt": "x", "user": "bob"}).status_code == 200
    assert [(one.tenant, one.share, one.priority) for one in server.service.requests] == [
        ("alice", 3.0, -5),
        ("alice", 3.0, 0),
    ]
    for key in ("key-of-alic", "key-of-alice2", "KEY-OF-ALICE", hashlib.sha256(b"key-of-alice").hexdigest(), "é"):
        answer = httpx.post(server.url + CHAT, json=HELLO, headers={"Authorization": f"Bearer {key}".encode()})
        assert answer.status_code == 401


def test_a_priority_needs_a_key_that_may_have_one(server: Live, bob: httpx.Client) -> None:
    for path, body in ((CHAT, HELLO), ("/v1/responses", {"input": "x", "background": True})):
        error = bob.post(path, json={**body, "priority": -1}).json()["error"]
        assert (error["param"], error["code"]) == ("priority", "invalid_value")
        assert "scheduling: priority" in error["message"]
    assert bob.post(CHAT, json={**HELLO, "priority": 0}).status_code == 200


def test_without_priority_scheduling_a_priority_is_refused() -> None:
    service = FakeService()
    service.card.by_priority = False
    with live(service) as server:
        answer = httpx.post(server.url + CHAT, json={**HELLO, "priority": 1}, timeout=120)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        assert httpx.post(server.url + CHAT, json={**HELLO, "user": "me"}, timeout=120).status_code == 200
        assert service.requests[-1].tenant == "me"


def test_responses_belong_to_the_key_that_made_them(alice: httpx.Client, bob: httpx.Client) -> None:
    made = alice.post("/v1/responses", json={"input": "Hello"}).json()["id"]
    behind = alice.post("/v1/responses", json={"input": "Hello", "background": True}).json()["id"]
    for name in (made, behind):
        refused = [
            bob.get(f"/v1/responses/{name}"),
            bob.get(f"/v1/responses/{name}?stream=true"),
            bob.get(f"/v1/responses/{name}/input_items"),
            bob.post(f"/v1/responses/{name}/cancel"),
            bob.delete(f"/v1/responses/{name}"),
            bob.post("/v1/responses", json={"input": "and", "previous_response_id": name}),
        ]
        assert [answer.status_code for answer in refused] == [404] * 6
        # as it is said of one that never was
        never = bob.get("/v1/responses/resp_0").json()["error"]["message"]
        assert refused[0].json()["error"]["message"].replace(name, "resp_0") == never
        assert alice.get(f"/v1/responses/{name}").status_code == 200
    assert alice.post("/v1/responses", json={"input": "and", "previous_response_id": made}).status_code == 200
    assert alice.delete(f"/v1/responses/{made}").status_code == 200


def test_videos_belong_to_the_key_that_made_them_over_restarts_too(tmp_path: Path) -> None:
    jobs, door = tmp_path / "jobs", tmp_path / "door"

    def both(url: str) -> tuple[httpx.Client, httpx.Client]:
        return client_with(url, "key-of-alice"), client_with(url, "key-of-bob")

    def listed(http: httpx.Client) -> set[str]:
        return {video["id"] for video in http.get("/v1/videos").json()["data"]}

    with serving(jobs, tenants=TENANTS) as server:
        alice, bob = both(server.url)
        with alice, bob:
            done = ended(alice, created(alice)["id"])["id"]
            other = ended(bob, created(bob)["id"])["id"]
            late = created(alice, prompt=f"wait for {door}", user="bob")["id"]
            until(alice, late, lambda video: video["progress"] == 50)
    door.touch()
    with serving(jobs, filmer(), tenants=TENANTS) as server:
        alice, bob = both(server.url)
        with alice, bob:
            assert (listed(alice), listed(bob)) == ({done, late}, {other})
            for path in (done, f"{done}/content", late):
                assert bob.get(f"/v1/videos/{path}").status_code == 404
            assert bob.delete(f"/v1/videos/{done}").status_code == 404
            assert bob.get("/v1/videos", params={"after": done}).status_code == 404
            assert ended(alice, late)["status"] == "completed"
            assert {(one.tenant, one.share) for one in server.service.requests} == {("alice", 3.0)}
            assert alice.get(f"/v1/videos/{done}/content").status_code == 200
            assert alice.delete(f"/v1/videos/{done}").status_code == 200
    with serving(jobs) as server, httpx.Client(base_url=server.url, timeout=120) as anybody:
        assert listed(anybody) == set(), "without keys, what belongs to one is nobody's"


def test_a_video_from_before_there_were_keys_runs_as_nobody_s(tmp_path: Path) -> None:
    door = tmp_path / "door"
    with serving(tmp_path / "jobs") as server, httpx.Client(base_url=server.url, timeout=120) as http:
        early = created(http, prompt=f"wait for {door}", user="alice")["id"]
        until(http, early, lambda video: video["progress"] == 50)
        assert server.service.requests[-1].tenant == "alice"
    with serving(tmp_path / "jobs", gated := filmer(), tenants=TENANTS):
        began = time.monotonic()
        while not gated.requests:
            assert time.monotonic() < began + 120
            time.sleep(0.01)
        assert {(one.tenant, one.share) for one in gated.requests} == {("", 1.0)}


def test_adapters_belong_to_the_key_that_loaded_them(server: Live, alice: httpx.Client, bob: httpx.Client) -> None:
    def models(http: httpx.Client) -> list[str]:
        return [model["id"] for model in http.get("/v1/models").json()["data"]]

    def load(http: httpx.Client, name: str, path: str) -> httpx.Response:
        return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})

    def unload(http: httpx.Client, name: str) -> httpx.Response:
        return http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    assert load(alice, "bard", "/srv/hers").status_code == 200
    assert load(alice, "bard", "/srv/again").status_code == load(alice, "fake-omni", "/srv/a").status_code == 400
    assert (models(alice), models(bob)) == (["fake-omni", "poet", "bard"], ["fake-omni", "poet"])
    assert bob.get("/v1/models/bard").status_code == unload(bob, "bard").status_code == 404
    for name in ("bard", "alice/bard"):
        assert bob.post(CHAT, json={**HELLO, "model": name}).status_code == 404
    assert load(bob, "bard", "/srv/his").status_code == 200  # a name is not taken by another's
    assert [http.get("/v1/models/bard").json()["root"] for http in (alice, bob)] == ["/srv/hers", "/srv/his"]
    server.service.requests.clear()
    for http in (alice, bob):
        assert http.post(CHAT, json={**HELLO, "model": "bard"}).status_code == 200
        assert http.post(CHAT, json={**HELLO, "model": "poet"}).status_code == 200
    assert [one.adapter for one in server.service.requests] == ["alice/bard", "poet", "bob/bard", "poet"]
    assert unload(bob, "poet").status_code == 400, "that of the deployment is for all"
    assert unload(bob, "bard").status_code == 200
    assert (models(alice), models(bob)) == (["fake-omni", "poet", "bard"], ["fake-omni", "poet"])


def test_so_many_requests_at_once(server: Live) -> None:
    gate = Gate()

    async def wait(request: Request) -> AsyncGenerator[Delta]:
        await gate.wait()
        async for delta in speak(request):
            yield delta

    server.service.script = wait
    with client_with(server.url, "key-of-single") as single, ThreadPoolExecutor(1) as thread:
        first = thread.submit(single.post, CHAT, json=HELLO)
        assert gate.reached.wait(120)
        second = single.post(CHAT, json=HELLO)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert second.headers["retry-after"] == "1"
        assert single.get("/v1/models").status_code == 200
        gate.open()
        assert first.result().status_code == 200
        server.service.script = speak
        assert single.post(CHAT, json=HELLO).status_code == 200
        # a job goes on without its client: it is one of those at once until it ends, and can be cancelled
        gate = Gate()
        server.service.script = wait
        job = single.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
        assert gate.reached.wait(120)
        assert single.post(CHAT, json=HELLO).status_code == 429
        assert single.post(f"/v1/responses/{job}/cancel").json()["status"] == "cancelled"
        server.service.script = speak
        assert single.post(CHAT, json=HELLO).status_code == 200


def test_so_many_requests_per_minute(server: Live) -> None:
    with client_with(server.url, "key-of-rare") as rare:
        answers = [rare.post(CHAT, json=HELLO) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    said = [
        {name: answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")} for answer in answers
    ]
    assert said == [{"limit": "2", "remaining": left} for left in ("1", "0", "0")]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    reset = answers[2].headers["x-ratelimit-reset-requests"]
    assert reset == "1m0s" or 30 < float(reset.removesuffix("s")) < 60
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-of-rare", max_retries=0) as client,
        pytest.raises(openai.RateLimitError, match="'rare' has used its 2 requests per minute"),
    ):
        client.embeddings.create(model="fake-omni", input="x")


def test_so_many_tokens_per_minute(server: Live) -> None:
    """Those of `usage`, where an answer ends; at least those that came, where its client leaves."""
    with client_with(server.url, "key-of-terse") as terse:
        first = terse.post(CHAT, json=HELLO)
        assert (first.status_code, first.headers["x-ratelimit-limit-tokens"]) == (200, "20")
        assert first.json()["usage"]["total_tokens"] == 15
        assert terse.post(CHAT, json={**HELLO, "temperature": "x"}).headers["x-ratelimit-remaining-tokens"] == "5"
        assert terse.post(CHAT, json=HELLO).status_code == 200  # what is owed is paid later
        third = terse.post(CHAT, json=HELLO)
        assert (third.status_code, third.headers["x-ratelimit-remaining-tokens"]) == (429, "0")
        assert 25 <= int(third.headers["retry-after"]) <= 36
        assert "tokens_per_minute" in third.json()["error"]["message"]


def test_tokens_that_came_are_charged_however_the_answer_ends(server: Live) -> None:
    """Or a client could set a deadline just before the end, or leave there, and read everything for nothing."""
    bad = {**HELLO, "temperature": "x"}

    async def too_late(request: Request) -> AsyncGenerator[Delta]:
        if request.prompt != "at once":
            for _ in range(10):
                yield TextDelta("thinker", "x", [5])
        raise DeadlineExceeded("the deadline has passed")

    async def endless(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "x", [5] * 20)
        await Gate().wait()

    with client_with(server.url, "key-of-hasty") as hasty:

        def left() -> int:
            return int(hasty.post(CHAT, json=bad).headers["x-ratelimit-remaining-tokens"])

        server.service.script = too_late
        assert hasty.post("/v1/completions", json={"prompt": "at once"}).status_code == 504
        assert left() == 50
        assert hasty.post(CHAT, json={**HELLO, "stream": True}).status_code == 200
        assert 38 <= left() <= 45  # 1 for the prompt and 10; some have come back since
        server.service.script = endless
        with hasty.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer:
            next(line for line in answer.iter_lines() if '"x"' in line)
        while server.service.cancelled.get(timeout=120) != server.service.requests[-1].request_id:
            pass  # earlier ones
        assert 17 <= left() <= 30


def test_a_bucket_fills_evenly() -> None:
    now = 0.0
    bucket = Bucket(120, lambda: now)
    bucket.take(150)
    assert (bucket.level(), bucket.seconds_until(1)) == (-30, 15.5)
    now = 20.0
    assert bucket.level() == 10
    now = 1000.0
    assert bucket.level() == 120


def test_keys_are_never_logged() -> None:
    lines = io.StringIO()
    configure_logging("debug", as_json=True, stream=lines)
    try:
        with live(FakeService(), ServerSettings(drain_seconds=1, tenants=TENANTS)) as server:
            for key in ("key-of-alice", "key-of-nobody"):
                with client_with(server.url, key) as client:
                    client.get("/v1/models")
    finally:
        for name in ("segue", "uvicorn.error"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [], True
            logger.setLevel(logging.NOTSET)
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["status"], line.get("tenant")) for line in said if "status" in line] == [(200, "alice"), (401, None)]
    assert "key-of" not in lines.getvalue() + repr(ServerSettings(api_key="key-of", tenants=TENANTS))


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hashed = hashlib.sha256(b"two").hexdigest()
    text = (
        f"a:\n  key: [12345678, one]\n  share: 2\n  max_requests: 4\nb:\n  sha256: {hashed}\n  tokens_per_minute: 9\n"
    )
    first, second = read_keys(written(tmp_path, text))
    assert (first.name, first.share, first.max_requests, first.priority) == ("a", 2.0, 4, False)
    assert first.digests == (digest("12345678"), digest("one"))
    assert (second.name, second.digests, second.tokens_per_minute) == ("b", (digest("two"),), 9)
    [everyone] = read_keys(written(tmp_path, "sk-only\n"))
    assert (everyone.name, everyone.digests) == ("", (digest("sk-only"),))
    assert not caplog.records
    read_keys(written(tmp_path, text, 0o644))
    read_keys(written(tmp_path, "a: {'key' : x}", 0o644))
    assert ["chmod 600" in record.message for record in caplog.records] == [True, True]
    read_keys(written(tmp_path, f"# no key: here\nb: {{sha256: {hashed}}}", 0o644))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: it must be a mapping of tenants, or one key and nothing else"),
        ("alice: SECRET", "line 1: a tenant must be a mapping, with key or sha256 in it"),
        ("SECRET: alice", "line 1: a tenant must be a mapping"),
        ("SECRET:\n  share: 2", "line 1: this tenant has no key"),
        ("alice:\n  key: x\n  shar: 2", "line 3: a tenant has no such field; did you mean 'share'"),
        ("alice:\n  SECRET: x", "line 2: a tenant has no such field; known: key,"),
        ("alice:\n  key: x\n  share: 0", "line 3: share must be a number above 0 and at most 1000"),
        ("alice:\n  key: x\n  share: SECRET", "line 3: share must be a number above 0"),
        ("alice:\n  key: x\n  max_requests: 1.5", "line 3: max_requests must be an integer of at least 1"),
        ("alice:\n  key: x\n  max_requests: 2026-99-99", "line 3: max_requests must be an integer of at least 1"),
        ("alice: {key: SECRET, share: !foo 3}", "line 1: share must be a number above 0"),
        ("alice: {key: SECRET, priority: !!bool 3}", "line 1: priority must be true or false"),
        ("alice: {key: SECRET, share: !!int ''}", "line 1: share must be a number above 0"),
        ("alice: {key: SECRET, share: !!timestamp x}", "line 1: share must be a number above 0"),
        ("alice: &SECRET {key: SECRET, share: *SECRET}", "line 1: share must be a number above 0"),
        ("alice: {key: SECRET, share: " + "[" * 5000, "line 1: this is not YAML"),
        ("alice:\n  key: SECRET SECRET", "line 2: key must be visible ASCII"),
        ("alice:\n  sha256: SECRET", "line 2: sha256 must be 64 hexadecimal digits"),
        ("alice:\n  key: x\nbob:\n  key: x", "line 3: a key of this tenant was given in line 1 already"),
        ("SECRET:\n  key: x\nSECRET:\n  key: y", "line 3: this tenant is written twice"),
        ("alice:\n  key: *SECRET", "line 2: this is not YAML"),
        ("a/b:\n  key: x", "line 1: a tenant's name must be"),
    ],
)
def test_what_is_wrong_in_a_file_of_keys(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(written(tmp_path, text))
    assert message in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(*more: str) -> argparse.Namespace:
        return parser().parse_args(["serve", "model", *more])

    path = str(written(tmp_path, "a: {key: x}"))
    monkeypatch.delenv("SEGUE_API_KEY", raising=False)
    assert _keys(given()) == (None, ())
    monkeypatch.setenv("SEGUE_API_KEY", "from-environment")
    assert _keys(given()) == ("from-environment", ())
    assert _keys(given("--api-key", " from-flag\n")) == ("from-flag", ())
    key, [tenant] = _keys(given("--api-keys", path))
    assert (key, tenant.name) == (None, "a")
    with pytest.raises(ConfigError, match="give one of them"):
        _keys(given("--api-keys", path, "--api-key", "x"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        _keys(given("--api-keys", path + "x"))
    for wrong, why in (("", "empty"), ("kéy", "visible ASCII"), ("two words", "visible ASCII")):
        monkeypatch.setenv("SEGUE_API_KEY", wrong)
        with pytest.raises(ConfigError, match=f"SEGUE_API_KEY: the key .*{why}"):
            _keys(given())
        with pytest.raises(SystemExit):
            given("--api-key", wrong)
