"""The Responses API on a real model: what it says is what a chat completion of the same says."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from server_process import NAME, Served

from segue.media.encode import encode_image


@pytest.fixture(scope="module")
def omni(plain_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{plain_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, messages: Any) -> str:
    reply = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=12)
    return reply.choices[0].message.content or ""


def test_a_conversation(omni: openai.OpenAI) -> None:
    """Whole, streamed, and gone on from: the messages are those of a chat."""
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is at sea?"},
    ]
    first = omni.responses.create(
        model=NAME, input="What is at sea?", instructions="Be brief.", temperature=0, max_output_tokens=12, store=True
    )
    assert first.output_text == chat(omni, said) != ""
    with omni.responses.stream(
        model=NAME, input="What is at sea?", instructions="Be brief.", temperature=0, max_output_tokens=12
    ) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == first.output_text
    second = omni.responses.create(
        model=NAME,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "And on land?"}]}],
        instructions="Be brief.",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=12,
    )
    said += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And on land?"}]
    assert second.output_text == chat(omni, said)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens > 0


def test_as_anthropic_has_it(omni: openai.OpenAI) -> None:
    """The same words as a chat completion's, whole and streamed; and as many tokens as were counted."""
    asked = {
        "model": NAME,
        "max_tokens": 12,
        "temperature": 0,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is at sea?"}]}],
    }
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is at sea?"}]
    url = str(omni.base_url).rstrip("/") + "/messages"
    whole = httpx.post(url, json=asked, timeout=240).json()
    assert [block["text"] for block in whole["content"]] == [chat(omni, said)]
    usage = whole["usage"]
    counted = httpx.post(
        f"{url}/count_tokens", json={name: asked[name] for name in ("model", "system", "messages")}, timeout=240
    ).json()
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    lines = httpx.post(url, json={**asked, "stream": True}, timeout=240).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[0]["message"]["usage"]["input_tokens"] == counted["input_tokens"]
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"]
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] != "tool_use"


def test_a_grammar_holds_the_reply(omni: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"at": {"enum": ["sea", "land"]}}, "required": ["at"]}
    form: Any = {"type": "json_schema", "name": "where", "schema": {**schema, "additionalProperties": False}}
    told = omni.responses.create(model=NAME, input="Where?", text={"format": form}, temperature=0)
    assert json.loads(told.output_text)["at"] in ("sea", "land")


def test_an_image(omni: openai.OpenAI) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    url = "data:image/png;base64," + base64.b64encode(encode_image(pixels.tobytes(), 56, 56, "png")).decode()
    item: Any = {
        "role": "user",
        "content": [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": url}],
    }
    reply = omni.responses.create(model=NAME, input=[item], temperature=0, max_output_tokens=12)
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    assert reply.output_text == chat(omni, [{"role": "user", "content": parts}])
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.to_dict()["image_tokens"] > 0
    item["content"][1]["image_url"] = "data:image/png;base64,AAAA"
    with pytest.raises(openai.BadRequestError) as caught:
        omni.responses.create(model=NAME, input=[item], stream=True)
    assert caught.value.param == "input[0].content[1]"


def test_in_the_background(omni: openai.OpenAI) -> None:
    """What is made while nobody waits is what is said to who waits; who comes back misses no event."""
    asked: Any = {"model": NAME, "input": "What is at sea?", "temperature": 0, "max_output_tokens": 12}
    whole = omni.responses.create(**asked)
    made = omni.responses.create(**asked, background=True)
    assert made.status == "queued"
    while made.status in ("queued", "in_progress"):
        made = omni.responses.retrieve(made.id)
    assert made.output_text == whole.output_text
    assert made.usage is not None
    assert whole.usage is not None
    assert made.usage.total_tokens == whole.usage.total_tokens
    with omni.responses.create(**asked, background=True, stream=True) as stream:
        first = [next(stream) for _ in range(4)]
    name = first[0].response.id  # type: ignore[union-attr]
    rest = list(omni.responses.retrieve(name, stream=True, starting_after=first[-1].sequence_number))
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    long = {**asked, "max_output_tokens": 20_000, "extra_body": {"ignore_eos": True}}
    with omni.responses.create(**long, background=True, stream=True) as stream:
        name = next(stream).response.id  # type: ignore[union-attr]
        assert omni.responses.cancel(name).status == "cancelled"
        assert [event.type for event in stream][-1] == "response.cancelled"
    assert [item.type for item in omni.responses.input_items.list(name)] == ["message"]
