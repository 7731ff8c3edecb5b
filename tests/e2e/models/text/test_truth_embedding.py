"""A model of embeddings through the whole system, from Python and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from server_process import NAME, served
from truth_system import System

from segue.messages.errors import InvalidRequest
from segue.models.shared.library import AutoModel, AutoTokenizer
from segue.models.text.text_embedding import tiny

TEXTS = ["Hello", "The sea is grey.", "A small boat left the harbour in the early morning. " * 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    tiny.make("bert", directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> list[np.ndarray]:
    """The library directly: the mean of a text's hidden states, of length 1."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    vectors = []
    with torch.inference_mode():
        for text in TEXTS:
            vector = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            vectors.append((vector / vector.norm()).numpy())
    return vectors


@pytest.fixture(scope="module")
def system(model: Path) -> Iterator[System]:
    system = System(model)
    yield system
    system.close()


def check(outputs: list[Any], expected: list[np.ndarray]) -> None:
    for output, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.embedding, theirs, rtol=1e-4, atol=2e-6)
        assert output.text == ""
        assert output.usage.completion_tokens == 0


@pytest.mark.nightly
def test_from_python(system: System, expected: list[np.ndarray]) -> None:
    outputs = system.ask(*TEXTS)
    check(outputs, expected)
    assert outputs[0].usage.prompt_modalities == {"text": outputs[0].usage.prompt_tokens}
    with pytest.raises(InvalidRequest, match="cannot be cut"):
        system.ask({"prompt": "a", "options": {"dimensions": 3}})
    with pytest.raises(InvalidRequest, match="this model gives embedding"):
        system.ask({"prompt": "a", "modalities": ["text"]})


@pytest.mark.nightly  # test_truth_llm
def test_a_killed_worker_changes_nothing(system: System, expected: list[np.ndarray]) -> None:
    async def body() -> list[Any]:
        worker = system.stopped("embedder")
        tasks = [asyncio.create_task(system.omni.generate(text)) for text in TEXTS]
        await system.admitted(len(TEXTS))
        worker.kill()
        return await asyncio.gather(*tasks)

    outputs = system.run(body())
    check(outputs, expected)
    assert all(output.metrics.attempts == 2 for output in outputs)


def test_over_http(model: Path, expected: list[np.ndarray]) -> None:
    with served(model) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=NAME, input=TEXTS)
        for entry, theirs in zip(answer.data, expected, strict=True):
            np.testing.assert_allclose(entry.embedding, theirs, rtol=1e-4, atol=2e-6)
        counts = [len(AutoTokenizer.from_pretrained(model)(text)["input_ids"]) for text in TEXTS]
        assert answer.usage.prompt_tokens == sum(counts)
        pooled = httpx.post(f"{server.url}/pooling", json={"model": NAME, "input": TEXTS}, timeout=240).json()["data"]
        for row, theirs in zip(pooled, expected, strict=True):
            np.testing.assert_allclose(row["data"], theirs, rtol=1e-4, atol=2e-6)
        with pytest.raises(openai.BadRequestError, match="cannot be cut"):
            client.embeddings.create(model=NAME, input="a", dimensions=3)
        with pytest.raises(openai.BadRequestError, match="at most 512"):
            client.embeddings.create(model=NAME, input="sea " * 600)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Hello"}])


@pytest.mark.nightly
def test_scores_over_http(model: Path, expected: list[np.ndarray]) -> None:
    with served(model) as server, server.client() as http:
        answer = http.post("/v1/rerank", json={"model": NAME, "query": TEXTS[0], "documents": TEXTS[1:]}).json()
        cosines = [float(expected[0] @ other) for other in expected[1:]]
        assert [entry["index"] for entry in answer["results"]] == sorted(range(2), key=lambda index: -cosines[index])
        for entry in answer["results"]:
            assert entry["relevance_score"] == pytest.approx(cosines[entry["index"]], abs=2e-6)
