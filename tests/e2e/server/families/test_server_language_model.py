"""A language model over HTTP: log-probabilities, tokens and prompts are those of transformers and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from server_process import served, tiny

from segue.models.shared.dialects.dialect import dialect_of
from segue.models.shared.library import AutoModelForCausalLM, AutoTokenizer

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED: Any = [{"role": "user", "content": "What is at sea?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("language") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def http(checkpoint: Path) -> Iterator[httpx.Client]:
    with served(checkpoint, "--log-level", "warning") as server, server.client() as http:
        yield http


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def likelihood(http: httpx.Client, model: str, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """As lm-eval's `local-completions` asks for it and reads it."""
    answer = post(
        http, "/v1/completions", model=model, prompt=[context + continuation], temperature=0, max_tokens=1, logprobs=1,
        seed=1234, echo=True,
    )  # fmt: skip
    logprobs = answer["choices"][0]["logprobs"]
    scores = logprobs["token_logprobs"][len(context) : -1]
    tops = logprobs["top_logprobs"][len(context) : -1]
    assert len(scores) == len(continuation)
    return sum(scores), all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))


def test_log_likelihoods_are_the_library_s(http: httpx.Client, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    name = http.get("/v1/models").json()["data"][0]["id"]
    context = list(range(40, 60))
    with torch.no_grad():
        best = model.generate(torch.tensor([context]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    found = []
    for continuation in ([70, 71, 72], [70, 71, 73], best[0, len(context) :].tolist()):
        ids = context + continuation
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(scores[place - 1, ids[place]].item() for place in range(len(context), len(ids)))
        score, greedy = likelihood(http, name, context, continuation)
        assert score == pytest.approx(expected, abs=1e-3)
        found.append((round(score, 2), greedy))
    assert [greedy for _, greedy in found] == [False, False, True]
    assert found[0][0] != found[1][0], "another token, another number"


def test_tokens_are_the_tokenizer_s(http: httpx.Client, tokenizer: Any) -> None:
    text = "The small boat — left\nthe harbour"
    ids = tokenizer(text)["input_ids"]
    told = post(http, "/tokenize", prompt=text, return_token_strs=True)
    assert (told["tokens"], told["token_strs"]) == (ids, tokenizer.convert_ids_to_tokens(ids))
    assert post(http, "/detokenize", tokens=ids)["prompt"] == text
    expected = tokenizer.apply_chat_template(ASKED, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    told = post(http, "/tokenize", messages=ASKED, tools=[TOOL])
    assert told["tokens"] == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert told["count"] != post(http, "/tokenize", messages=ASKED)["count"], "the model is shown the tools"


def test_a_prompt_as_text_or_as_ids_is_one(http: httpx.Client, tokenizer: Any) -> None:
    name = http.get("/v1/models").json()["data"][0]["id"]
    text = "The small boat"
    ids = tokenizer(text)["input_ids"]
    common = {"model": name, "max_tokens": 6, "temperature": 0, "echo": True, "return_token_ids": True, "logprobs": 2}
    both = post(http, "/v1/completions", prompt=[text, text], **common)["choices"]
    [alone] = post(http, "/v1/completions", prompt=ids, **common)["choices"]
    for choice in (*both, alone):
        assert {**choice, "index": 0, "logprobs": None} == {**both[0], "index": 0, "logprobs": None}
        assert choice["logprobs"]["tokens"] == both[0]["logprobs"]["tokens"]
        # two prompts share a GEMM that one has for itself: sums are rounded in another order
        expected = both[0]["logprobs"]["token_logprobs"][1:]
        assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(one, abs=1e-4) for one in expected)]
    assert alone["prompt_token_ids"] == ids
    assert "".join(alone["logprobs"]["tokens"][: len(ids)]) == text
    assert alone["text"].startswith(text)


def test_the_official_client_drives_it(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        reply = client.completions.create(model=name, prompt=["a", "b"], n=2, max_tokens=4, temperature=1.0, seed=1)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        streamed = ["", "", "", ""]
        for chunk in client.completions.create(
            model=name, prompt=["a", "b"], n=2, max_tokens=4, temperature=1.0, seed=1, stream=True
        ):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == [choice.text for choice in reply.choices]
        answer = client.chat.completions.create(model=name, messages=ASKED, tools=[TOOL], max_tokens=4, temperature=0)
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert answer.choices[0].message.tool_calls is None


def test_a_grammar_holds_the_reply_to_a_call(http: httpx.Client) -> None:
    """Random weights never call by themselves; held to it they must, with arguments that the schema allows."""
    at = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"]}
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {**at, "additionalProperties": False}}}
    named: Any = {"type": "function", "function": {"name": "look"}}
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        for choice in ("required", named):
            reply = client.chat.completions.create(
                model=name, messages=ASKED, tools=[tool], tool_choice=choice, parallel_tool_calls=False, max_tokens=200,
                temperature=0,
            )  # fmt: skip
            assert reply.choices[0].finish_reason == "tool_calls"
            assert reply.choices[0].message.content is None
            calls = reply.choices[0].message.tool_calls
            assert calls is not None
            [call] = calls
            assert call.function.name == "look"
            assert json.loads(call.function.arguments)["at"] in ("sea", "sky")


def test_a_response_of_calls(http: httpx.Client) -> None:
    at = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"]}
    tool: Any = {"type": "function", "name": "look", "parameters": {**at, "additionalProperties": False}}
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        asked: dict[str, Any] = {"model": name, "input": "What is at sea?", "tools": [tool], "temperature": 0}
        whole = client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
        [call] = whole.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)["at"] in ("sea", "sky")) == ("look", True)
        with client.responses.stream(**asked, tool_choice={"type": "function", "name": "look"}) as stream:
            deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            [streamed] = stream.get_final_response().output
        assert streamed.type == "function_call"
        assert "".join(deltas) == streamed.arguments
        answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a ship"}
        after = client.responses.create(
            model=name, input=[answer], tools=[tool], previous_response_id=whole.id, max_output_tokens=4
        )
        assert after.usage is not None
        assert whole.usage is not None
        assert after.usage.input_tokens > whole.usage.input_tokens


def test_the_dialect_is_the_family_s(checkpoint: Path) -> None:
    dialect = dialect_of(checkpoint, json.loads((checkpoint / "config.json").read_text()))
    assert dialect.calls is not None
    assert (dialect.calls.name, dialect.template_variables) == ("hermes", {"enable_thinking"})


def test_a_prompt_is_found_again_only_under_its_salt(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    asked = {"model": model, "prompt": [list(range(200, 248))], "max_tokens": 1, "temperature": 0}
    cached = [
        post(http, "/v1/completions", **asked, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ({"cache_salt": "one"}, {"cache_salt": "one"}, {"cache_salt": "two"}, {}, {})
    ]
    assert cached[1] == cached[4] > 0
    assert [cached[0], cached[2], cached[3]] == [0, 0, 0]
