"""Vectors are what the library and the checkpoint's recipe give for each text alone, whatever shares the call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from text_stages import answered, context, edit
from transformers import AutoModelForMaskedLM  # after conftest has mended torchvision

from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import Message, Request, TextPart
from segue.models.registry import family_of, read_config
from segue.models.shared.library import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from segue.models.shared.text.batches import bucket
from segue.models.shared.tiny.weights import randomise
from segue.models.text.text_embedding import tiny
from segue.models.text.text_embedding.embedder import POOL, Embedder
from segue.models.text.text_embedding.input import InputProcessor
from segue.models.text.text_embedding.recipe import POOLINGS

TEXTS = (
    *("Hello", "The sea is grey.", "The sea was grey.", "a", "Who is speaking in the recording?"),
    "A small boat left the harbour in the early morning, and nobody spoke. " * 6,
    "Seven brothers lived in a house with seven windows.",
)
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


@pytest.fixture(scope="module", params=tiny.PRESETS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny.make(request.param, made)
    return made


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    tiny.make("bert", made)
    return made


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    """[T, H] of one text → [H], each mode in the words of its definition."""
    count = len(hidden)
    weights = torch.arange(1.0, count + 1)
    return {
        "cls": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "mean": lambda: hidden.mean(0),
        "max": lambda: hidden.amax(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / count**0.5,
        "weightedmean": lambda: (weights @ hidden) / weights.sum(),
    }[mode]()


@torch.inference_mode()
def reference(directory: Path, texts: Sequence[str], *modes: str) -> list[torch.Tensor]:
    """The library directly, one text at a time, normalized at the end."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    vectors = []
    for text in texts:
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vector = torch.cat([pooled(hidden, mode) for mode in modes])
        vectors.append(vector / vector.norm())
    return vectors


def embed(directory: Path, texts: Sequence[str], embedder: Embedder | None = None, **options: Any) -> list[Any]:
    """All texts through both stages, in calls of up to four; an error where there is one."""
    inputs = InputProcessor(context(directory, "input"))
    requests = [
        Request(request_id=str(index), prompt=text, modalities=["embedding"], options=options)
        for index, text in enumerate(texts)
    ]
    outputs = answered(inputs, embedder or Embedder(context(directory, "embedder")), requests)
    return [output.error or (output.payload or {})["embedding"] for output in outputs]


def assert_close(vectors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for vector, theirs in zip(vectors, expected, strict=True):
        torch.testing.assert_close(vector, theirs, **CLOSE)


def test_parity(directory: Path) -> None:
    mode = "mean" if "bert" in directory.name else "lasttoken"
    expected = reference(directory, TEXTS, mode)
    vectors = embed(directory, TEXTS)
    assert_close(vectors, expected)
    assert max(float(a @ b) for i, a in enumerate(vectors) for b in vectors[:i]) < 0.995, "texts differ"


def test_parity_fails_when_a_word_or_a_weight_is_changed(directory: Path, tmp_path: Path) -> None:
    mode = "mean" if "bert" in directory.name else "lasttoken"
    expected = reference(directory, TEXTS, mode)
    with pytest.raises(AssertionError):
        assert_close(embed(directory, [text.replace("e", "o") for text in TEXTS]), expected)
    embedder = Embedder(context(directory, "embedder"))
    with torch.no_grad():
        next(embedder._model.parameters())[:, 0] += 1.0
    with pytest.raises(AssertionError):
        assert_close(embed(directory, TEXTS, embedder), expected)


@pytest.mark.parametrize("mode", POOLINGS)
def test_pooling(bert: Path, tmp_path: Path, mode: str) -> None:
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    assert_close(embed(directory, TEXTS), reference(bert, TEXTS, mode))
    assert set(POOL) == set(POOLINGS)


def test_several_poolings_are_concatenated(bert: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    edit(directory / "1_Pooling" / "config.json", pooling_mode_cls_token=True)
    embedder = Embedder(context(directory, "embedder"))
    assert embedder.dimensions == 128
    assert_close(embed(directory, TEXTS, embedder), reference(bert, TEXTS, "cls", "mean"))


def test_dense_layers(bert: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    modules = json.loads((directory / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (directory / "modules.json").write_text(json.dumps(modules))
    dense = directory / "2_Dense"
    dense.mkdir()
    values = {"in_features": 64, "out_features": 24, "bias": True}
    (dense / "config.json").write_text(
        json.dumps({**values, "activation_function": "torch.nn.modules.activation.Tanh"})
    )
    weight, bias = torch.randn(24, 64), torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, dense / "model.safetensors")
    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert).eval()
    expected = []
    with torch.inference_mode():
        for text in TEXTS:
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            vector = torch.tanh(weight @ mean + bias)
            expected.append(vector / vector.norm())
    assert_close(embed(directory, TEXTS), expected)
    edit(dense / "config.json", in_features=63)
    with pytest.raises(ConfigError, match="takes vectors of 63; those before it have 64"):
        Embedder(context(directory, "embedder"))
    edit(dense / "config.json", activation_function="torch.nn.GELU")
    with pytest.raises(ConfigError, match="'GELU' is not served; Identity and Tanh are"):
        Embedder(context(directory, "embedder"))


@pytest.mark.parametrize("kind", ["xlm-roberta", "mpnet", "distilbert", "modernbert", "electra"])
def test_other_encoders(bert: Path, tmp_path: Path, kind: str) -> None:
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "distilbert":
        shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
    config = AutoConfig.for_model(
        kind, **shape, vocab_size=672, intermediate_size=96, max_position_embeddings=300, pad_token_id=640
    )
    config.pad_token_id = 1  # published ones have it there; positions are counted from it
    if kind == "electra":
        config.embedding_size = 64
    (directory / "sentence_bert_config.json").unlink()
    model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, 3)
    model.save_pretrained(directory)
    assert_close(embed(directory, TEXTS), reference(directory, TEXTS, "mean"))
    assert InputProcessor(context(directory, "input"))._longest == (298 if kind in ("xlm-roberta", "mpnet") else 300)


def test_a_language_models_checkpoint(tmp_path: Path) -> None:
    """With the names that tensors have in a causal LM."""
    tiny.make("qwen3-embedding", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, 5)
    model.save_pretrained(tmp_path)
    assert_close(embed(tmp_path, TEXTS), reference(tmp_path, TEXTS, "lasttoken"))


def test_vectors_are_cut_where_the_model_was_trained_for_it(tmp_path: Path) -> None:
    tiny.make("qwen3-embedding", tmp_path)
    whole = reference(tmp_path, TEXTS, "lasttoken")
    cut = [vector[:20] / vector[:20].norm() for vector in whole]
    assert_close(embed(tmp_path, TEXTS, dimensions=20), cut)
    assert_close(embed(tmp_path, TEXTS, dimensions=64), whole)
    edit(tmp_path / "config.json", matryoshka_dimensions=[16, 32])
    assert len(embed(tmp_path, TEXTS, dimensions=32)[0]) == 32
    for wrong, text in ((20, r"one of \[16, 32\]"), (0, "positive integer"), (True, "positive integer"), ("a", "'a'")):
        with pytest.raises(InvalidRequest, match=text) as caught:
            embed(tmp_path, TEXTS, dimensions=wrong)
        assert caught.value.field == "dimensions"


def test_vectors_are_not_cut_where_it_was_not(bert: Path) -> None:
    with pytest.raises(InvalidRequest, match="this model's vectors have 64 and cannot be cut"):
        embed(bert, TEXTS, dimensions=32)


def test_like_lengths_share_a_bucket() -> None:
    assert [bucket(length) for length in (1, 8, 9, 33, 64, 65, 128, 129, 500)] == [8, 8, 16, 64, 64, 128, 128, 192, 512]


def test_requests_that_are_wrong(bert: Path) -> None:
    inputs = InputProcessor(context(bert, "input", max_model_len=20))
    assert len(inputs.process(Request(request_id="r", prompt_token_ids=[1] * 20))["token_ids"]) == 20
    for fields, field, text in (
        ({"prompt_token_ids": [1] * 21}, "prompt_token_ids", "21 tokens; this model takes at most 20"),
        ({"prompt": "sea " * 30}, "prompt", "at most 20"),
        ({"prompt": "sea " * 6000}, "prompt", "more than 40 tokens; the context is 20"),
        ({"prompt_token_ids": [672]}, "prompt_token_ids[0]", "from 0 to 671"),
        ({"messages": [Message("user", [TextPart("a")])]}, "messages", "no chat"),
    ):
        with pytest.raises(InvalidRequest, match=text) as caught:
            inputs.process(Request(request_id="r", **fields))
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="max_model_len is 513; this model takes up to 512"):
        InputProcessor(context(bert, "input", max_model_len=513))


def test_special_tokens_on_request(bert: Path) -> None:
    inputs = InputProcessor(context(bert, "input"))
    with_them = inputs.process(Request(request_id="r", prompt="Hello"))["token_ids"].tolist()
    without = inputs.process(Request(request_id="r", prompt="Hello", add_special_tokens=False))["token_ids"].tolist()
    assert with_them == [642, *without, 643]


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ([], "a Transformer and a Pooling must come first"),
        (["Transformer"], "lists Transformer; a Transformer and a Pooling"),
        (["Transformer", "Pooling", "LayerNorm"], "module 'LayerNorm' is not served"),
    ],
)
def test_recipes_that_are_not_served(bert: Path, tmp_path: Path, modules: list[str], text: str) -> None:
    """Refused before a process is started."""
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    listed = [{"path": "1_Pooling" if kind == "Pooling" else "", "type": f"models.{kind}"} for kind in modules]
    (directory / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=text):
        family_of(read_config(directory), directory)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"pooling_mode": "average"}, "pooling mode 'average' is not served"),
        ({}, "names no pooling mode"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt is false"),
    ],
)
def test_poolings_that_are_not_served(bert: Path, tmp_path: Path, values: dict[str, Any], text: str) -> None:
    directory = Path(shutil.copytree(bert, tmp_path / "copy"))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=text):
        family_of(read_config(directory), directory)


def test_a_checkpoint_with_a_recipe_is_one_of_embeddings(directory: Path, tmp_path: Path) -> None:
    """Also where its architecture is a causal LM's."""
    assert family_of(read_config(directory), directory).name == "text_embedding"
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    (copy / "modules.json").unlink()
    if "qwen" in directory.name:
        assert family_of(read_config(copy), copy).name == "causal_lm"


def test_dummy_weights(directory: Path) -> None:
    [vector] = embed(directory, ["Hello"], Embedder(context(directory, "embedder", load_format="dummy")))
    assert vector.norm() == pytest.approx(1.0, abs=1e-5)
