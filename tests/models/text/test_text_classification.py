"""Classes are what the library's own pipeline gives for each text alone, whatever shares the call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import pipeline

from segue.engines.contract import LoadContext, StageRequest
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import Message, Request, TextPart
from segue.messages.sampling import FALLBACK
from segue.models.registry import family_of, read_config
from segue.models.shared.library import AutoConfig, AutoModelForSequenceClassification
from segue.models.shared.tiny.weights import randomise
from segue.models.text.text_classification import tiny
from segue.models.text.text_classification.classifier import Classifier
from segue.models.text.text_classification.input import InputProcessor

TEXTS = (
    "The sea is grey.",
    "Who is speaking?",
    "The sea was grey.",
    "a",
    "A small boat left the harbour in the early morning, and nobody spoke. " * 6,
    "Seven brothers lived in a house with seven windows.",
)
CLOSE = 2e-6


def context(directory: Path, stage: str = "classifier", **more: Any) -> LoadContext:
    return LoadContext(directory, stage, torch.device("cpu"), torch.float32, **more)


@pytest.fixture(scope="module", params=tiny.PRESETS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("bert-classifier", tmp_path_factory.mktemp("bert"))


def made(name: str, directory: Path) -> Path:
    tiny.PRESETS[name].make(directory, "tiny", 0)
    return directory


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def reference(directory: Path, texts: Sequence[str], **options: Any) -> list[tuple[str, list[float]]]:
    """(the best label, all scores in the order of the checkpoint), from the library's pipeline."""
    classify = pipeline("text-classification", model=str(directory), device="cpu", dtype=torch.float32, top_k=None)
    labels = list(classify.model.config.id2label.values())
    found = []
    for scores in classify(list(texts), **options):
        by_label = {entry["label"]: entry["score"] for entry in scores}
        found.append((scores[0]["label"], [by_label[label] for label in labels]))
    return found


def classify(
    directory: Path, texts: Sequence[str], classifier: Classifier | None = None, **options: Any
) -> list[tuple[str, list[float]]]:
    """All texts through both stages, in calls of up to four."""
    inputs = InputProcessor(context(directory, "input"))
    engine = ModuleEngine(classifier or Classifier(context(directory)), ModuleConfig(max_batch=4))
    for index, text in enumerate(texts):
        request = Request(request_id=str(index), prompt=text, modalities=["classes"], options=options)
        engine.add(
            StageRequest(
                str(index),
                "classifier",
                request,
                FALLBACK,
                seed=0,
                upstreams=frozenset({"input"}),
                downstreams=frozenset(),
                to_client=frozenset({"classes"}),
            )
        )
        engine.feed(str(index), "input", inputs.process(request), final=True)
    found: dict[str, tuple[str, list[float]]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            payload: dict[str, Any] = output.payload or {}
            found[output.request_id] = payload["label"], payload["classes"].tolist()
    assert engine.stats()["calls_total"] < len(texts) or len(texts) == 1, "some share a call"
    return [found[str(index)] for index in range(len(texts))]


def assert_close(found: list[tuple[str, list[float]]], expected: list[tuple[str, list[float]]]) -> None:
    assert [label for label, _ in found] == [label for label, _ in expected]
    np.testing.assert_allclose([one for _, one in found], [one for _, one in expected], rtol=1e-4, atol=CLOSE)


def test_parity(directory: Path) -> None:
    expected = reference(directory, TEXTS)
    assert_close(classify(directory, TEXTS), expected)
    assert len({label for label, _ in expected}) > 1, "texts differ in their class"
    sums = [sum(scores) for _, scores in expected]
    one_of_them = read_config(directory)["problem_type"] == "single_label_classification"
    assert all(abs(total - 1) < 1e-5 for total in sums) == one_of_them


def test_parity_fails_when_a_text_or_a_weight_is_changed(directory: Path) -> None:
    expected = reference(directory, TEXTS)
    with pytest.raises(AssertionError):
        assert_close(classify(directory, [text + "?" for text in TEXTS]), expected)
    classifier = Classifier(context(directory))
    with torch.no_grad():
        next(classifier.network.model.parameters())[:, 0] += 1.0
    with pytest.raises(AssertionError):
        assert_close(classify(directory, TEXTS, classifier), expected)


@pytest.mark.parametrize("kind", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_the_problem_says_what_becomes_of_the_logits(bert: Path, tmp_path: Path, kind: str | None) -> None:
    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    edit(copy / "config.json", problem_type=kind)
    expected = reference(copy, TEXTS)
    assert_close(classify(copy, TEXTS), expected)
    logits = reference(copy, TEXTS, function_to_apply="none")
    assert_close(classify(copy, TEXTS, use_activation=False), logits)
    assert (expected == logits) == (kind == "regression")


def test_a_network_that_takes_one_text_at_a_time(bert: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    config = AutoConfig.for_model(
        "llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=672, intermediate_size=96,
        max_position_embeddings=300, num_labels=3, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    randomise(model, 3)
    model.save_pretrained(directory)
    edit(directory / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    assert_close(classify(directory, TEXTS), reference(directory, TEXTS, batch_size=1))


def test_requests_that_are_wrong(bert: Path) -> None:
    inputs = InputProcessor(context(bert, "input", max_model_len=20))
    for fields, field, text in (
        ({"messages": [Message("user", [TextPart("a")])]}, "messages", "has no chat"),
        ({"prompt": "sea " * 30}, "prompt", "at most 20"),
        ({"prompt_token_ids": [10**6]}, "prompt_token_ids[0]", "1000000"),
    ):
        with pytest.raises(InvalidRequest, match=text) as caught:
            inputs.process(Request(request_id="r", **fields))
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="use_activation is 'no'; it must be true or false"):
        classify(bert, TEXTS[:1], use_activation="no")
    with pytest.raises(ConfigError, match="max_model_len is 513; this model takes up to 512"):
        InputProcessor(context(bert, "input", max_model_len=513))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"problem_type": "multi_label"}, "did you mean 'multi_label_classification'"),
        ({"is_encoder_decoder": True}, "an encoder-decoder is not served"),
    ],
)
def test_models_that_are_not_served(bert: Path, tmp_path: Path, values: dict[str, Any], text: str) -> None:
    """Refused before a process is started."""
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    edit(directory / "config.json", **values)
    with pytest.raises(ConfigError, match=text):
        family_of(read_config(directory), directory)


def test_its_labels_say_what_a_checkpoint_is(directory: Path, tmp_path: Path) -> None:
    assert family_of(read_config(directory), directory).name == "text_classification"
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    edit(copy / "config.json", id2label=None)  # two, as the library has it
    assert family_of(read_config(copy), copy).name == "text_classification"
    edit(copy / "config.json", id2label={"0": "LABEL_0"})
    assert family_of(read_config(copy), copy).name == "cross_encoder"


def test_dummy_weights(directory: Path) -> None:
    [(_, scores)] = classify(directory, TEXTS[:1], Classifier(context(directory, load_format="dummy")))
    assert all(0 < score < 1 for score in scores)
