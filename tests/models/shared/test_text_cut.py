"""Texts cut to so many tokens: what the library gives for the text as its own tokenizer cuts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from text_stages import answered, context

from segue.messages.errors import InvalidRequest, TooLong
from segue.messages.request import Request
from segue.models.shared.library import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from segue.models.text.cross_encoder import tiny as pairs_tiny
from segue.models.text.cross_encoder.input import InputProcessor as PairInput
from segue.models.text.cross_encoder.scorer import Scorer
from segue.models.text.text_embedding import tiny
from segue.models.text.text_embedding.embedder import Embedder
from segue.models.text.text_embedding.input import InputProcessor

TEXT = "Seven brothers lived in a house with seven windows, and nobody spoke."
OTHER = "The sea is grey."


@pytest.fixture(scope="module", params=tiny.PRESETS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny.make(request.param, made)
    return made


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pairs")
    pairs_tiny.PRESETS["bert-cross-encoder"].make(made, "tiny", 0)
    return made


def cut(**request: Any) -> Request:
    options = {name: request.pop(name) for name in ("truncate_prompt_tokens", "truncation_side") if name in request}
    return Request(request_id="r", modalities=["embedding"], options=options, **request)


@torch.inference_mode()
def vector_of(directory: Path, **call: Any) -> torch.Tensor:
    """The library's, of BERT or Qwen3, for a call of the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(directory, truncation_side=call.pop("side"))
    read = tokenizer(TEXT, return_tensors="pt", truncation=True, **call)
    hidden = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()(**read).last_hidden_state[0]
    vector = hidden.mean(0) if "bert" in directory.name else hidden[-1]
    return vector / vector.norm()


@pytest.mark.parametrize(("said", "side"), [(None, "right"), ("right", "right"), ("left", "left")])
def test_a_vector_of_a_cut_text(directory: Path, said: str | None, side: str) -> None:
    inputs, embedder = InputProcessor(context(directory, "input")), Embedder(context(directory, "embedder"))
    chosen = {} if said is None else {"truncation_side": said}
    asked = cut(prompt=TEXT, truncate_prompt_tokens=7, **chosen)
    (output,) = answered(inputs, embedder, [asked])
    assert output.payload is not None
    assert output.prompt_tokens == 7
    torch.testing.assert_close(
        output.payload["embedding"], vector_of(directory, side=side, max_length=7), rtol=1e-4, atol=2e-6
    )


def test_ids_are_cut_as_they_are(directory: Path) -> None:
    inputs = InputProcessor(context(directory, "input"))
    for side, kept in (("left", [7, 8]), ("right", [5, 6])):
        asked = cut(prompt_token_ids=[5, 6, 7, 8], truncate_prompt_tokens=2, truncation_side=side)
        assert inputs.process(asked)["token_ids"].tolist() == kept


def test_no_longer_than_the_model_takes(directory: Path) -> None:
    """-1: as much as the model takes; else such a text is refused."""
    inputs = InputProcessor(context(directory, "input", max_model_len=6))
    assert len(inputs.process(cut(prompt=TEXT * 20, truncate_prompt_tokens=-1))["token_ids"]) == 6
    with pytest.raises(TooLong):
        inputs.process(cut(prompt=TEXT * 20))
    for most, side in ((7, "left"), (0, "left"), (True, "left"), (3, "middle")):
        with pytest.raises(InvalidRequest) as caught:
            inputs.process(cut(prompt=TEXT, truncate_prompt_tokens=most, truncation_side=side))
        name = "truncation_side" if side == "middle" else "truncate_prompt_tokens"
        assert caught.value.field == f"options.{name}"


@torch.inference_mode()
def test_a_pair_loses_of_its_longer_text(pairs: Path) -> None:
    inputs, scorer = PairInput(context(pairs, "input")), Scorer(context(pairs, "scorer"))
    model = AutoModelForSequenceClassification.from_pretrained(pairs, dtype=torch.float32).eval()
    for side in ("left", "right"):
        tokenizer = AutoTokenizer.from_pretrained(pairs, truncation_side=side)
        read = tokenizer(TEXT, OTHER, return_tensors="pt", truncation=True, max_length=15)
        options = {"text_pair": OTHER, "truncate_prompt_tokens": 15, "truncation_side": side}
        asked = Request(request_id=side, prompt=TEXT, modalities=["score"], options=options)
        (output,) = answered(inputs, scorer, [asked])
        assert output.payload is not None
        assert output.prompt_tokens == 15
        assert output.payload["score"] == pytest.approx(float(model(**read).logits[0, 0].sigmoid()), rel=1e-4)


def test_something_of_the_text_must_be_left(pairs: Path) -> None:
    inputs = PairInput(context(pairs, "input"))
    asked = Request(request_id="r", prompt=TEXT, options={"text_pair": OTHER, "truncate_prompt_tokens": 3})
    with pytest.raises(InvalidRequest, match="adds 3 tokens to two texts, so it must be at least 4"):
        inputs.process(asked)
