"""Scores are what the library gives for each pair alone, whatever shares the call."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from text_stages import answered, context, edit

from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import Message, Request, TextPart
from segue.models.registry import family_of, read_config
from segue.models.shared.library import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from segue.models.shared.tiny.weights import randomise
from segue.models.text.cross_encoder import tiny
from segue.models.text.cross_encoder.input import InputProcessor
from segue.models.text.cross_encoder.scorer import Scorer

PAIRS = (
    ("Who is speaking?", "The sea is grey."),
    ("The sea is grey.", "Who is speaking?"),
    ("Who is speaking?", "The sea was grey."),
    ("a", "b"),
    ("Seven brothers", "A small boat left the harbour in the early morning, and nobody spoke. " * 6),
    ("Who is speaking in the recording?", "Seven brothers lived in a house with seven windows."),
)
CLOSE = {"rel": 1e-4, "abs": 2e-6}


@pytest.fixture(scope="module", params=tiny.PRESETS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny.PRESETS[request.param].make(made, "tiny", 0)
    return made


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    tiny.PRESETS["bert-cross-encoder"].make(made, "tiny", 0)
    return made


@torch.inference_mode()
def reference(directory: Path, pairs: Sequence[tuple[str, str]], *, sigmoid: bool = True) -> list[float]:
    """The library directly, one pair at a time."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    logits = [model(**tokenizer(one, other, return_tensors="pt")).logits[0, 0] for one, other in pairs]
    return [float(logit.sigmoid() if sigmoid else logit) for logit in logits]


def score(
    directory: Path, pairs: Sequence[tuple[str, str]], scorer: Scorer | None = None, **options: Any
) -> list[float]:
    """All pairs through both stages, in calls of up to four."""
    inputs = InputProcessor(context(directory, "input"))
    requests = [
        Request(request_id=str(index), prompt=one, modalities=["score"], options={"text_pair": other, **options})
        for index, (one, other) in enumerate(pairs)
    ]
    outputs = answered(inputs, scorer or Scorer(context(directory, "scorer")), requests)
    assert not any(output.error for output in outputs)
    return [(output.payload or {})["score"] for output in outputs]


def test_parity(directory: Path) -> None:
    expected = reference(directory, PAIRS)
    assert score(directory, PAIRS) == pytest.approx(expected, **CLOSE)
    assert len({round(one, 4) for one in expected}) == len(PAIRS), "pairs differ, and so do their orders"


def test_parity_fails_when_a_text_or_a_weight_is_changed(directory: Path) -> None:
    expected = reference(directory, PAIRS)
    for side in (0, 1):
        changed = [tuple(text + "?" if at == side else text for at, text in enumerate(pair)) for pair in PAIRS]
        assert score(directory, changed) != pytest.approx(expected, **CLOSE)
    scorer = Scorer(context(directory, "scorer"))
    with torch.no_grad():
        next(scorer.network.model.parameters())[:, 0] += 1.0
    assert score(directory, PAIRS, scorer) != pytest.approx(expected, **CLOSE)


def test_bare_logits(directory: Path, tmp_path: Path) -> None:
    """By request, and where the checkpoint says so, in the older way or the newer one."""
    expected = reference(directory, PAIRS, sigmoid=False)
    assert expected != pytest.approx(reference(directory, PAIRS), **CLOSE)
    assert score(directory, PAIRS, use_activation=False) == pytest.approx(expected, **CLOSE)
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    edit(copy / "config.json", sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    assert score(copy, PAIRS) == pytest.approx(expected, **CLOSE)
    edit(copy / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"})
    assert score(copy, PAIRS) == pytest.approx(reference(directory, PAIRS), **CLOSE)


@pytest.mark.parametrize("kind", ["xlm-roberta", "modernbert", "llama"])
def test_other_models(bert: Path, tmp_path: Path, kind: str) -> None:
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        kind,
        **shape,
        vocab_size=672,
        intermediate_size=96,
        max_position_embeddings=300,
        type_vocab_size=2,
        num_labels=1,
        pad_token_id=None if kind == "llama" else 1,
    )
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    randomise(model, 3)
    model.save_pretrained(directory)
    if kind in ("modernbert", "llama"):
        edit(directory / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    assert score(directory, PAIRS) == pytest.approx(reference(directory, PAIRS), **CLOSE)


def test_requests_that_are_wrong(bert: Path) -> None:
    inputs = InputProcessor(context(bert, "input", max_model_len=20))
    for fields, field, text in (
        ({"prompt": "a"}, "options.text_pair", "text_pair is None"),
        ({"prompt": "a", "options": {"text_pair": 3}}, "options.text_pair", "must be the text"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids", "compares two texts"),
        ({"messages": [Message("user", [TextPart("a")])]}, "messages", "compares two texts"),
        ({"prompt": "sea " * 9, "options": {"text_pair": "sea " * 9}}, "prompt", "this model takes at most 20"),
        ({"prompt": "a", "options": {"text_pair": "sea " * 5000}}, "options.text_pair", "more than 40 tokens"),
    ):
        with pytest.raises(InvalidRequest, match=text) as caught:
            inputs.process(Request(request_id="r", **fields))
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="use_activation is 'no'; it must be true or false"):
        score(bert, PAIRS[:1], use_activation="no")
    with pytest.raises(ConfigError, match="max_model_len is 513; this model takes up to 512"):
        InputProcessor(context(bert, "input", max_model_len=513))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.GELU"}, "'torch.nn.GELU' is not served"),
        ({"is_encoder_decoder": True}, "an encoder-decoder is not served"),
    ],
)
def test_models_that_are_not_served(bert: Path, tmp_path: Path, values: dict[str, Any], text: str) -> None:
    """Refused before a process is started."""
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    edit(directory / "config.json", **values)
    with pytest.raises(ConfigError, match=text):
        family_of(read_config(directory), directory)


def test_its_class_says_what_a_checkpoint_is(directory: Path) -> None:
    assert family_of(read_config(directory), directory).name == "cross_encoder"


def test_dummy_weights(directory: Path) -> None:
    [one] = score(directory, PAIRS[:1], Scorer(context(directory, "scorer", load_format="dummy")))
    assert 0 < one < 1
