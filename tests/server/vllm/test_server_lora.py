"""LoRA adapters over HTTP: models of their own, loaded and unloaded where the operator allows it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from fake_service import FakeService, Live, live

from segue.server.settings import ServerSettings

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    service = FakeService()
    service.card.adapters["poet"] = "/srv/poet"
    with live(service, ServerSettings(allow_runtime_lora=True, drain_seconds=1)) as server:
        yield server


def test_an_adapter_is_a_model_of_its_own(server: Live, client: openai.OpenAI) -> None:
    server.service.requests.clear()
    assert client.chat.completions.create(model="poet", messages=HELLO).model == "poet"  # type: ignore[arg-type]
    assert client.completions.create(model="poet", prompt="Once").model == "poet"
    client.completions.create(model="fake-omni", prompt="Once")
    assert [request.adapter for request in server.service.requests] == ["poet", "poet", None]
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert (models["poet"]["parent"], models["poet"]["root"]) == ("fake-omni", "/srv/poet")
    assert models["fake-omni"]["parent"] is None
    assert client.models.retrieve("poet").model_dump() == models["poet"]
    with pytest.raises(openai.NotFoundError, match="did you mean 'poet'"):
        client.chat.completions.create(model="poets", messages=HELLO)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="did you mean 'poet'"):
        client.models.retrieve("poets")


def test_loaded_and_unloaded(server: Live, client: openai.OpenAI) -> None:
    body = {"lora_name": "bard", "lora_path": "/srv/bard"}
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=120)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'bard' added successfully.")
    assert "bard" in {model.id for model in client.models.list()}
    answer = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "bard"}, timeout=120)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'bard' removed successfully.")
    assert "bard" not in {model.id for model in client.models.list()}
    answer = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "bard"}, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "a", "lora_path": "/broken"}, "lora_path"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a" * 257, "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "/" + "a" * 4096}, "lora_path"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "/a", "rank": 3}, "rank"),
    ],
)
def test_what_cannot_be_loaded(server: Live, body: dict[str, object], param: str) -> None:
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("length", [0, 257, 100_000])
def test_a_name_that_none_can_have_is_not_told_again(server: Live, length: int) -> None:
    answer = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "a" * length}, timeout=120)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "lora_name")
    assert all(fact in error["message"] for fact in ("lora_name", str(length), "1 to 256"))


def test_only_where_the_operator_allows_it() -> None:
    with live(FakeService()) as server:
        for path in ("load", "unload"):
            answer = httpx.post(
                f"{server.url}/v1/{path}_lora_adapter", json={"lora_name": "a", "lora_path": "/a"}, timeout=120
            )
            assert answer.status_code == 400
            assert "--allow-runtime-lora" in answer.json()["error"]["message"]
        assert server.service.card.adapters == {}
