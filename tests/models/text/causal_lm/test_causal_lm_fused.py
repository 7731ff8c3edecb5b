"""GEMMs of several linear layers, found in any family; the parity tests run with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from causal_lm_family import Served, generate, load, make, prompts

from lora_files import make_adapter
from segue.graph.deployment.options import LoraPlan
from segue.kernels.cpu.gated_mlp import GatedMLP
from segue.kernels.linear.fused_linear import FusedPart
from segue.models.text.causal_lm.llm import LLM

FUSED = {
    "llama": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "qwen2": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "gemma3": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "qwen3-moe": {"q_proj", "k_proj", "v_proj"},
    "mixtral": {"q_proj", "k_proj", "v_proj"},
    "phi3": set(),
    "gpt2": set(),
    "deepseek_v3": {"q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj"},
}
"""By kind: the leaves of the names of what is fused. Experts are fused tensors in the library, Phi-3's and GPT-2's
layers are so in the checkpoint."""
PROMPTS = prompts()[3:24]
TOKENS = 8


def fused_leaves(adapter: LLM) -> set[str]:
    modules = dict(adapter.library_decoder.named_modules())
    parts = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, FusedPart)}
    gated = any(isinstance(module, GatedMLP) for module in modules.values())
    return parts | ({"gate_proj", "up_proj"} if gated else set())


@pytest.mark.parametrize("kind", FUSED)
def test_what_is_fused(kind: str, tmp_path: Path) -> None:
    directory = make(kind, tmp_path)
    fused, apart = load(directory), load(directory, fused=False)
    assert fused_leaves(fused) == FUSED[kind]
    assert fused_leaves(apart) == set()
    assert fused.weight_bytes <= apart.weight_bytes  # each of several layouts pads its last outputs
    assert Served(fused).run(PROMPTS, TOKENS) == Served(apart).run(PROMPTS, TOKENS)


def test_not_where_adapters_are_over_them(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "llama")
    path = make_adapter(directory, tmp_path / "a", ("q_proj",), rank=4, seed=1)
    assert fused_leaves(load(directory, lora=LoraPlan({"a": str(path)}))) == set()
    assert fused_leaves(load(directory, quantization="int8")) == fused_leaves(load(directory)) != set()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_recorded_steps(tmp_path: Path) -> None:
    """The steps of several sequences run over fixed tensors, again and again."""
    directory = make("qwen2", tmp_path)
    some = PROMPTS[:3]
    expected = generate(directory, some, TOKENS)
    served = Served(load(directory), attention="triton", max_batch=4, num_blocks=16)
    assert served.run(some, TOKENS) == expected


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_deterministic(kind: str, tmp_path: Path) -> None:
    """The same logits to the bit in any batch, with GEMMs of several layers and packed experts too."""
    adapter = load(make(kind, tmp_path))
    alone = [Served(adapter, deterministic=True).run([prompt], 3)[0] for prompt in PROMPTS[2:4]]
    assert Served(adapter, deterministic=True).run(PROMPTS[2:4], 3) == alone
