"""Embeddings of a prompt's tokens give what the prompt gives; and what bounds a reply, through the whole system."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from truth_system import System

from segue.messages.errors import InvalidRequest
from segue.messages.sampling import RepetitionDetection, SamplingParams
from segue.models.shared.library import AutoModelForCausalLM, AutoTokenizer
from segue.models.text.causal_lm import tiny
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.server.app import create_app

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, repetition_penalty=1.0)
TEXTS = (
    "The sea is grey, and the ship has left the harbour in the early morning; nobody spoke.",
    "The sea is grey, and the ship has left the harbour in the early morning; everybody sang.",
    "Hello",
)


class Embedded:
    """The library's own embeddings."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.rows = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).get_input_embeddings()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def of(self, text: str) -> torch.Tensor:
        with torch.no_grad():
            return self.rows(torch.tensor(self.ids(text)))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Embedded]]:
    directory = tmp_path_factory.mktemp("qwen3")
    tiny.make("qwen3", directory)
    system = System(
        directory,
        stages={"llm": {"max_tokens_per_step": 16, "block_size": 8}},
        limits={"max_prompt_embeds_bytes": "1MiB"},
    )
    yield system, Embedded(directory)
    system.close()


def post(system: System, path: str, **body: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(system.omni))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, json={"model": system.omni.card.name, "temperature": 0, **body}, timeout=300)

    return system.run(ask())


def test_embeddings_are_the_prompt(running: tuple[System, Embedded]) -> None:
    """Alone, in a batch, in pieces (of 16 tokens) and after a hit."""
    system, library = running
    plain = [system.ask({"prompt": text, "sampling": GREEDY})[0] for text in TEXTS]
    assert len({tuple(output.token_ids["llm"]) for output in plain}) == len(TEXTS)
    embedded = [{"prompt_embeds": library.of(text), "sampling": GREEDY} for text in TEXTS]
    alone = [system.ask(one)[0] for one in embedded]
    together = system.ask(*embedded, *({"prompt": text, "sampling": GREEDY} for text in TEXTS))
    for outputs in (alone, together[:3], together[3:]):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert [output.usage.prompt_tokens for output in outputs] == [len(library.ids(text)) for text in TEXTS]
    shared = (len(library.ids(TEXTS[1])) - 1) // 8 * 8
    assert alone[0].usage.cached_tokens == 0, "what came as ids is not what came as embeddings"
    assert 0 < alone[1].usage.cached_tokens <= shared, "the first rows are those of the first text"
    assert together[1].usage.cached_tokens == shared
    changed = library.of(TEXTS[1])
    changed[0, 0] += 0.5
    [other] = system.ask({"prompt_embeds": changed, "sampling": GREEDY})
    assert other.usage.cached_tokens == 0


def test_over_http(running: tuple[System, Embedded]) -> None:
    system, library = running
    files = []
    for text in TEXTS[:2]:
        file = io.BytesIO()
        torch.save(library.of(text), file)
        files.append(base64.b64encode(file.getvalue()).decode())
    found = post(system, "/v1/completions", prompt_embeds=files, return_token_ids=True).json()
    plain = post(system, "/v1/completions", prompt=list(TEXTS[:2]), return_token_ids=True).json()
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in plain["choices"]]
    assert found["usage"] == plain["usage"] | {"prompt_tokens_details": found["usage"]["prompt_tokens_details"]}
    for body, field, text in (
        ({"prompt_embeds": "###"}, "prompt_embeds[0]", "is not base64"),
        ({"prompt_embeds": [files[0], "aGVsbG8="]}, "prompt_embeds[1]", "neither a file"),
        ({"prompt_embeds": files[0], "prompt": "Hello"}, "prompt_embeds", "give one"),
        ({"prompt_embeds": files[0], "echo": True}, "echo", "no text"),
        ({"prompt_embeds": files[0], "prompt_logprobs": 1}, "prompt_logprobs", "no token ids"),
        ({"prompt_embeds": []}, "prompt_embeds", "is empty"),
        ({}, "prompt", "is missing"),
    ):
        answer = post(system, "/v1/completions", **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], text in error["message"]) == (400, field, True), error
    large = base64.b64encode(bytes(1 << 20) + b"x").decode()
    assert post(system, "/v1/completions", prompt_embeds=large).status_code == 413


def encoded(rows: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(rows, file)
    return base64.b64encode(file.getvalue()).decode()


def embeds(data: Any) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": data}


def test_parts_of_messages(running: tuple[System, Embedded]) -> None:
    """As the texts that they are of, the template around them: over HTTP and in Python, with text and alone."""
    system, library = running
    first, second = (text.replace("ship", "boat") for text in TEXTS[:2])
    pieces = ("<|im_start|>user\n", first, "\nWhat is it?\n", second, "<|im_end|>\n<|im_start|>assistant\n")
    ids = [token for piece in pieces for token in library.ids(piece)]
    [plain] = system.ask({"prompt_token_ids": ids, "sampling": GREEDY})
    for made in (library.of, lambda text: encoded(library.of(text))):
        content = [embeds(made(first)), {"type": "text", "text": "What is it?"}, embeds(made(second))]
        messages = [{"role": "user", "content": content}]
        for _ in range(2):
            [output] = system.ask({"messages": messages, "sampling": GREEDY})
            assert output.usage.prompt_tokens == len(ids)
            assert output.token_ids == plain.token_ids
        assert output.usage.cached_tokens == (len(ids) - 1) // 8 * 8
    answer = post(system, "/v1/chat/completions", messages=messages, max_tokens=16, return_token_ids=True).json()
    [choice] = answer["choices"]
    assert choice["token_ids"] == plain.token_ids["llm"]
    assert not answer.get("prompt_token_ids")
    assert library.of(second).shape != library.of(first).shape
    other = [{"role": "user", "content": [*content[:2], embeds(library.of(first))]}]
    [output] = system.ask({"messages": other, "sampling": GREEDY})
    assert output.token_ids != plain.token_ids


def test_wrong_parts_of_messages(running: tuple[System, Embedded]) -> None:
    system, library = running
    rows = library.of("Hello")
    for content, others, field, says in (
        (embeds("###"), {}, "messages[0].content[0].data", "not base64"),
        (embeds("aGVsbG8="), {}, "messages[0].content[0]", "neither a file"),
        (embeds(encoded(rows[:, :-1])), {}, "messages[0].content[0]", "must have [tokens, 64]"),
        (embeds(encoded(rows)), {"prompt_logprobs": 1}, "prompt_logprobs", "no token ids"),
        (embeds(encoded(rows)), {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "no token ids"),
    ):
        answer = post(system, "/v1/chat/completions", messages=[{"role": "user", "content": [content]}], **others)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], says in error["message"]) == (400, field, True), error
    many = [embeds(encoded(torch.zeros(3000, 64)))] * 2
    answer = post(system, "/v1/chat/completions", messages=[{"role": "user", "content": many}])
    assert answer.status_code == 413
    assert "max_prompt_embeds_bytes" in answer.json()["error"]["message"]


def test_only_where_the_deployment_says_so(running: tuple[System, Embedded], tmp_path: Path) -> None:
    _, library = running
    tiny.make("llama", tmp_path)
    closed = AsyncOmni(tmp_path)
    with pytest.raises(InvalidRequest, match="this deployment accepts none"):
        closed.stream(closed.request({"prompt_embeds": library.of("Hello")}))
    parts = [{"role": "user", "content": [embeds(library.of("Hello"))]}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].*this deployment accepts none"):
        closed.stream(closed.request({"messages": parts}))


def test_a_thought_has_an_end(running: tuple[System, Embedded]) -> None:
    system, library = running
    budget = SamplingParams(thinking_token_budget=4, ignore_eos=True).over(GREEDY)
    opening, closing = (library.tokenizer.encode(mark, add_special_tokens=False) for mark in ("<think>", "</think>"))
    [output] = system.ask({"prompt_token_ids": library.ids("Why?") + opening, "sampling": budget})
    assert output.token_ids["llm"][4 : 4 + len(closing)] == closing
    assert "</think>" in output.text
    asked = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 12}
    assert post(system, "/v1/chat/completions", thinking_token_budget=4, **asked).status_code == 200
    wrong = post(system, "/v1/completions", prompt="Why?", thinking_token_budget=-7).json()["error"]
    assert wrong["param"] == "thinking_token_budget"


def test_a_reply_that_goes_round(running: tuple[System, Embedded]) -> None:
    system, _ = running
    pattern = {"max_pattern_size": 1, "min_count": 3}
    params = SamplingParams(allowed_token_ids=[5], repetition_detection=RepetitionDetection(**pattern)).over(GREEDY)
    [output] = system.ask({"prompt": "Hello", "sampling": params})
    assert (output.token_ids["llm"], output.finish_reason) == ([5, 5, 5], "repetition")
    for path, asked in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        [choice] = post(system, path, **asked, allowed_token_ids=[5], repetition_detection=pattern).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


def test_ids_without_text(running: tuple[System, Embedded]) -> None:
    system, _ = running
    body = {"prompt": "Hello", "detokenize": False, "return_token_ids": True, "max_tokens": 16}
    [choice] = post(system, "/v1/completions", **body).json()["choices"]
    [plain] = system.ask({"prompt": "Hello", "sampling": GREEDY})
    assert (choice["text"], choice["token_ids"]) == ("", plain.token_ids["llm"])


def test_a_model_that_marks_no_thoughts(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    omni = AsyncOmni(tmp_path)
    with pytest.raises(InvalidRequest, match="marks no reasoning") as caught:
        omni.stream(omni.request({"prompt": "Why?", "sampling": SamplingParams(thinking_token_budget=4)}))
    assert caught.value.field == "sampling.llm.thinking_token_budget"
