"""What the worker says to checkpoints that are broken, and to models that cannot be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_family import Served, generate, load, make, prompts
from safetensors.torch import load_file, save_file

from segue.engines.autoregressive.step.check import check_attention
from segue.messages.errors import ConfigError

PROMPTS = prompts()[9:15]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit(directory: Path, name: str, how: Any) -> None:
    """Change or drop one tensor of the checkpoint's files."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    path = directory / index["weight_map"][name]
    tensors = load_file(path)
    made = how(tensors.pop(name))
    if made is not None:
        tensors[name] = made
    save_file(tensors, path, metadata={"format": "pt"})


NAME = "model.layers.1.self_attn.k_proj.weight"


def test_parity_fails_when_one_weight_is_changed(llama: Path, copy: Path) -> None:
    answers = generate(llama, PROMPTS, 12)
    assert Served(load(copy)).run(PROMPTS, 12) == answers
    edit(copy, NAME, lambda weight: weight.index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(8.0)))
    assert Served(load(copy)).run(PROMPTS, 12) != answers


def test_parity_fails_when_one_token_of_a_prompt_is_changed(llama: Path) -> None:
    answers = generate(llama, PROMPTS, 12)
    changed = [[(prompt[0] + 1) % 640, *prompt[1:]] for prompt in PROMPTS]
    served = Served(load(llama)).run(changed, 12)
    assert all(one != other for one, other in zip(served, answers, strict=True))


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit(copy, NAME, lambda weight: None)
    with pytest.raises(ConfigError, match=f"1 tensors of the model are not in the checkpoint, the first is '{NAME}'"):
        load(copy)


def test_a_tensor_of_the_wrong_shape_is_named(copy: Path) -> None:
    edit(copy, NAME, lambda weight: weight[:-1].contiguous())
    with pytest.raises(ConfigError, match=r"cannot be loaded"):
        load(copy)


def test_pickled_weights_are_told_to_be_saved_anew(copy: Path) -> None:
    for path in copy.glob("model*"):
        path.unlink()
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"cannot be loaded.*; those in \.bin files are not read: save them as safe"):
        load(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00003"):
        load(copy)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_shard_that_is_cut_off_is_named(copy: Path, share: float) -> None:
    shard = copy / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors: the weights cannot be loaded"):
        load(copy)


def test_an_unreadable_config_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(copy)


def test_a_model_the_library_does_not_know(copy: Path) -> None:
    change(copy / "config.json", model_type="never_heard_of")
    with pytest.raises(ConfigError, match="never_heard_of"):
        load(copy)


def test_a_model_that_is_no_causal_lm(copy: Path) -> None:
    change(copy / "config.json", model_type="vit")
    with pytest.raises(ConfigError, match="has no such model of type 'vit'"):
        load(copy)


def test_load_format(llama: Path) -> None:
    dummy = load(llama, load_format="dummy")
    with torch.inference_mode():
        logits = dummy.logits(torch.randn(2, 64))
    assert logits.shape == (2, 672)
    assert torch.isfinite(logits).all()
    with pytest.raises(ConfigError, match="load_format is 'dumy'; did you mean 'dummy'"):
        load(llama, load_format="dumy")


def test_dummy_weights_are_tied_where_the_config_ties_them(tmp_path: Path) -> None:
    dummy = load(make("gemma3", tmp_path), load_format="dummy", dtype=torch.bfloat16)
    assert dummy.logits(dummy.embed(torch.tensor([3]), None)).argmax() == 3


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("openai-gpt", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "supports neither AttentionInterface"),
        ("xlstm", {"num_heads": 4}, "supports neither AttentionInterface"),
        ("doge", {"head_dim": 16}, "does not accept the engine's inputs"),
        (
            "minimax",
            {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "block_size": 16},
            "keep a state per sequence, but not in the library's cache",
        ),
        (
            "zamba2",
            {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_ngroups": 2}
            | {"n_mamba_heads": 8, "mamba_d_state": 16, "num_key_value_heads": 4, "num_mem_blocks": 1},
            r"1 of its 3 layers \(the first is 1\) attend",
        ),
    ],
)
def test_what_the_check_at_load_refuses(kind: str, values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Compared with the library itself, whatever the config says."""
    make(kind, tmp_path, **values)
    with pytest.raises(ConfigError, match=reason):
        check_attention(load(tmp_path))


def test_sampling_and_ends_are_those_of_generation_config(copy: Path) -> None:
    path = copy / "generation_config.json"
    adapter = load(copy)
    assert adapter.default_sampling.greedy
    assert adapter.end_token_ids == {641, 644}
    change(path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, eos_token_id=7)
    adapter = load(copy)
    assert adapter.end_token_ids == {7}
    sampling = adapter.default_sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
    assert sampling.repetition_penalty == 1.05
    path.unlink()  # then the config's own, else the tokenizer's
    assert load(copy).end_token_ids == {641, 644}
    change(copy / "config.json", eos_token_id=None)
    assert load(copy).end_token_ids == {644}


def test_the_context(copy: Path) -> None:
    assert load(copy).max_model_len == 1024
    assert load(copy, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len is 1025; this model can be served up to 1024"):
        load(copy, max_model_len=1025)


def test_a_rotary_scaling_that_changes_with_length_bounds_the_context(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    make("phi3", tmp_path, original_max_position_embeddings=128, rope_parameters=rope)
    adapter = load(tmp_path)
    assert adapter.max_model_len == 128
    assert Served(adapter).run(PROMPTS, 12) == generate(tmp_path, PROMPTS, 12)
