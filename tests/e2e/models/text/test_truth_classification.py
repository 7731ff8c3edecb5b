"""A classifier through the whole system, from Python and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import NAME, segue, served, tiny
from transformers import pipeline
from truth_system import System

TEXTS = ["The sea is grey.", "A small boat left the harbour in the early morning. " * 5, "Who is speaking?"]
Found = list[tuple[str, list[float]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("classes"), "bert-classifier")


@pytest.fixture(scope="module")
def expected(model: Path) -> Found:
    """The library's pipeline: (label, scores in the order of the checkpoint) of each text."""
    classify = pipeline("text-classification", model=str(model), device="cpu", top_k=None)
    labels = list(classify.model.config.id2label.values())
    return [
        (scores[0]["label"], [next(one["score"] for one in scores if one["label"] == label) for label in labels])
        for scores in classify(TEXTS)
    ]


@pytest.fixture
def system(model: Path) -> Iterator[System]:
    system = System(model)
    yield system
    system.close()


@pytest.mark.nightly
def test_from_python(system: System, expected: Found) -> None:
    outputs = system.ask(*({"prompt": text} for text in TEXTS))
    for output, (label, scores) in zip(outputs, expected, strict=True):
        assert output.label == label
        assert output.classes is not None
        assert output.classes.tolist() == pytest.approx(scores, abs=1e-5)


@pytest.mark.nightly
def test_over_http(model: Path, expected: Found) -> None:
    shown = segue("graph", str(model))
    assert "classifier" in shown.stdout
    with served(model) as server, server.client() as http:
        found = http.post("/classify", json={"model": NAME, "input": TEXTS}).json()["data"]
        assert [entry["label"] for entry in found] == [label for label, _ in expected]
        for entry, (_, scores) in zip(found, expected, strict=True):
            assert entry["probs"] == pytest.approx(scores, abs=1e-5)
        pooled = http.post("/pooling", json={"model": NAME, "input": TEXTS}).json()["data"]
        for entry, other in zip(pooled, found, strict=True):
            assert entry["data"] == pytest.approx(other["probs"], abs=1e-5)  # they may have shared another call
        refused = http.post("/classify", json={"model": NAME, "input": "sea " * 600})
        assert "takes at most 512" in refused.json()["error"]["message"]
        card = http.get("/v1/models").json()["data"][0]
        assert (card["family"], card["gives"]) == ("text_classification", ["classes"])
