"""What form the text must have, in the ways clients write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_service import FakeService, Live, live
from pydantic import BaseModel

from segue.messages.sampling import StructuredOutput

HELLO = [{"role": "user", "content": "Say hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeService()) as server:
        yield server


def ask(server: Live, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "fake-omni", "messages": HELLO, **body}, timeout=120
    )


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutput(json=SCHEMA),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            StructuredOutput(json_object=True),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutput(json="{}")),
        ({"guided_json": SCHEMA}, StructuredOutput(json=SCHEMA)),
        ({"response_format": TAG}, StructuredOutput(structural_tag=TAG)),
        ({"response_format": OLDER_TAG}, StructuredOutput(structural_tag=OLDER_TAG)),
        ({"structured_outputs": {"structural_tag": "{}"}}, StructuredOutput(structural_tag="{}")),
        (
            {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
            StructuredOutput(json="{}", disable_any_whitespace=True),
        ),
        ({"guided_regex": "a"}, StructuredOutput(regex="a")),
        ({"guided_choice": ["a", "b"], "response_format": {"type": "text"}}, StructuredOutput(choice=["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutput(grammar='root ::= "a"')),
        ({"sampling": {"thinker": {"structured_outputs": {"choice": ["a"]}}}}, StructuredOutput(choice=["a"])),
    ],
)
def test_every_way_means_the_same(server: Live, body: dict[str, Any], meant: StructuredOutput | None) -> None:
    assert ask(server, **body).status_code == 200
    params = server.service.requests[-1].sampling.get("thinker")
    assert (params.structured_outputs if params else None) == meant


def test_the_official_clients_own_way(server: Live) -> None:
    class Answer(BaseModel):
        a: int

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response
        # the script says "Hello, world", which is no JSON: only the request is looked at
        raw.parse(model="fake-omni", messages=HELLO, response_format=Answer)
    params = server.service.requests[-1].sampling["thinker"]
    assert params.structured_outputs is not None
    assert isinstance(params.structured_outputs.json, dict)
    assert params.structured_outputs.json["properties"]["a"]["type"] == "integer"


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"response_format": {"type": "json"}}, "response_format.type", "did you mean"),
        ({"response_format": {}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
            "an object",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "did you mean 'regex'"),
        ({"structured_outputs": {}}, "structured_outputs", "sets nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "sets nothing"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "structured_outputs sets regex",
        ),
        ({"response_format": {**TAG, "trigers": []}}, "response_format.trigers", "did you mean 'triggers'"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs", "Expected `array"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "give one"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format and guided_regex are given",
        ),
        ({"sampling": {"thinker": {"structured_outputs": {}}}}, "sampling.thinker.structured_outputs", "sets nothing"),
    ],
)
def test_wrong_ones_are_named(server: Live, body: dict[str, Any], param: str, word: str) -> None:
    answer = ask(server, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text
    assert word in answer.json()["error"]["message"]
