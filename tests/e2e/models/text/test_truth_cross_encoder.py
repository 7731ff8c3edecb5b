"""A cross-encoder through the whole system, from Python and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import NAME, served
from truth_system import System

from segue.messages.errors import InvalidRequest
from segue.models.shared.library import AutoModelForSequenceClassification, AutoTokenizer
from segue.models.text.cross_encoder import tiny

QUERY = "Who is at sea?"
TEXTS = ["The sea is grey.", "A small boat left the harbour in the early morning. " * 5, "Hello"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cross")
    tiny.PRESETS["bert-cross-encoder"].make(directory, "tiny", 0)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> list[float]:
    """The library directly."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.inference_mode():
        return [float(network(**tokenizer(QUERY, text, return_tensors="pt")).logits.sigmoid()) for text in TEXTS]


@pytest.fixture(scope="module")
def system(model: Path) -> Iterator[System]:
    system = System(model)
    yield system
    system.close()


def request(text: str) -> dict[str, Any]:
    return {"prompt": QUERY, "options": {"text_pair": text}}


@pytest.mark.nightly
def test_from_python(system: System, expected: list[float]) -> None:
    outputs = system.ask(*map(request, TEXTS))
    assert [output.score for output in outputs] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InvalidRequest, match="text_pair is None"):
        system.ask({"prompt": "a"})


@pytest.mark.nightly  # test_truth_embedding has one
def test_a_killed_worker_changes_nothing(system: System, expected: list[float]) -> None:
    async def body() -> list[Any]:
        worker = system.stopped("scorer")
        tasks = [asyncio.create_task(system.omni.generate(request(text))) for text in TEXTS]
        await system.admitted(len(TEXTS))
        worker.kill()
        return await asyncio.gather(*tasks)

    outputs = system.run(body())
    assert [output.score for output in outputs] == pytest.approx(expected, abs=1e-6)
    assert all(output.metrics.attempts == 2 for output in outputs)


@pytest.mark.nightly
def test_over_http(model: Path, expected: list[float]) -> None:
    with served(model) as server, server.client() as http:
        scored = http.post("/v1/score", json={"model": NAME, "text_1": QUERY, "text_2": TEXTS}).json()
        assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected, abs=1e-6)
        tokenizer = AutoTokenizer.from_pretrained(model)
        assert scored["usage"]["prompt_tokens"] == sum(len(tokenizer(QUERY, text)["input_ids"]) for text in TEXTS)
        ranked = http.post("/v1/rerank", json={"model": NAME, "query": QUERY, "documents": TEXTS, "top_n": 2}).json()
        best = sorted(range(3), key=lambda index: -expected[index])[:2]
        assert [entry["index"] for entry in ranked["results"]] == best
        refused = http.post("/v1/rerank", json={"model": NAME, "query": QUERY, "documents": ["sea " * 600]})
        assert "takes at most 512" in refused.json()["error"]["message"]
        refused = http.post("/v1/embeddings", json={"model": NAME, "input": "a"})
        assert "gives no embeddings" in refused.json()["error"]["message"]
