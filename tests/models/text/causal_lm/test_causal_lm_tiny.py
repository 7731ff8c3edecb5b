"""The small checkpoints: in the published formats, the same every time, and worth comparing on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from causal_lm_family import make
from safetensors import safe_open
from safetensors.torch import load_file

from segue.messages.errors import InvalidRequest
from segue.models.shared.library import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from segue.models.text.causal_lm import tiny
from segue.models.text.causal_lm.tiny_config import SMALL, config_values

QUESTIONS = (
    *("Hello", "What is the sea?", "Tell me a story about three birds and a boat.", "Why?", "Write a list"),
    *("Who is speaking?", "What do you see in the image?", "How many windows has the house?", "Good morning to you."),
)


@pytest.mark.parametrize("kind", SMALL)
def test_replies_depend_on_the_question_and_end_by_themselves(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    replies = []
    for text in QUESTIONS:
        if SMALL[kind].template is None:
            given = tokenizer(text, return_tensors="pt")
        else:
            messages = [{"role": "user", "content": text}]
            given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        out = model.generate(**given, do_sample=False, max_new_tokens=150)
        replies.append(out[0, given["input_ids"].shape[1] :].tolist())
    ends = set(model.generation_config.eos_token_id)
    lengths = [len(reply) for reply in replies if reply[-1] in ends]
    assert len(lengths) >= len(QUESTIONS) // 2
    assert len(set(lengths)) > 2, "of different lengths"
    assert len({tuple(reply) for reply in replies}) > len(QUESTIONS) // 2
    assert sum(len(set(reply)) for reply in replies) > 0.5 * sum(len(reply) for reply in replies), "they do not loop"
    if not model.config.tie_word_embeddings:
        texts = [tokenizer.decode(reply, skip_special_tokens=True) for reply in replies]
        assert all(text.isprintable() and text.isascii() for text in texts)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ["model.layers.1.self_attn.q_proj.weight", "lm_head.weight"]),
        ("qwen3-moe", ["model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.gate.weight"]),
        ("mixtral", ["model.layers.1.block_sparse_moe.experts.3.w2.weight"]),
        ("gpt-oss", ["model.layers.0.self_attn.sinks", "model.layers.0.mlp.experts.gate_up_proj"]),
        ("phi3", ["model.layers.0.self_attn.qkv_proj.weight"]),
        ("gpt2", ["transformer.h.0.attn.c_attn.weight"]),
    ],
)
def test_tensors_have_their_published_names(kind: str, names: list[str], tmp_path: Path) -> None:
    make(kind, tmp_path)
    found: set[str] = set()
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    assert set(names) <= found


def test_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        tiny.make("qwen2", tmp_path / name, seed=seed)
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [path.name for path in one] == [path.name for path in two]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, two, strict=True) if a.suffix == ".json")
    weights = [path for path in one if path.suffix == ".safetensors"]
    assert len(weights) > 1
    for path in weights:
        mine, theirs, other = (load_file(tmp_path / name / path.name) for name in ("one", "two", "three"))
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert not all(torch.equal(mine[key], other[key]) for key in mine if mine[key].ndim > 1)


@pytest.mark.parametrize(("kind", "size", "millions"), [("qwen2", "387m", 387), ("qwen3", "33m", 33)])
def test_frozen_shapes(kind: str, size: str, millions: int) -> None:
    config = AutoConfig.for_model(SMALL[kind].model_type, **config_values(SMALL[kind], size))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert round(sum(math.prod(parameter.shape) for parameter in model.parameters()) / 1e6) == millions


def test_an_unknown_size(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no size '388m'; did you mean '387m'"):
        tiny.make("qwen2", tmp_path, size="388m")
