"""Models that take no attention from outside, but a cache: greedy tokens equal transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_family import Served, generate, load, make, prompts, varied

from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import ConfigError
from segue.models.text.causal_lm.family import claims
from selection import daily

PROMPTS = prompts()
TOKENS = 14
_PLAIN = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
KINDS: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {**_PLAIN, "n_ctx": 512, "rotary_dim": 8},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 96},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 24},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "gptj": {**_PLAIN, "rotary_dim": 8},
    "mpt": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "expansion_ratio": 2,
        "max_seq_len": 512,
        "tie_word_embeddings": True,
    },
    "stablelm": {},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "pad_token_id": 1},
}


def checkpoint(kind: str, directory: Path) -> Path:
    return make(kind, directory, **{"tie_word_embeddings": False, **KINDS[kind]})


@pytest.mark.parametrize("kind", daily(sorted(KINDS), ("bloom", "falcon", "gptj", "xglm")))
def test_parity(kind: str, tmp_path: Path) -> None:
    """In one batch with prefill in pieces, after hits, and after preemption."""
    directory = checkpoint(kind, tmp_path)
    expected = varied(directory, PROMPTS, TOKENS)
    adapter = load(directory)
    assert adapter.kv.gathered
    served = Served(adapter, max_tokens_per_step=48)
    assert served.run(PROMPTS, TOKENS) == expected
    hits = served.engine.stats()["prefix_hit_tokens_total"]
    assert served.run(PROMPTS, TOKENS) == expected
    assert served.engine.stats()["prefix_hit_tokens_total"] - hits > 300
    tight = Served(adapter, num_blocks=24, max_tokens_per_step=64)
    assert tight.run(PROMPTS, TOKENS) == expected
    assert tight.engine.stats()["preemptions_total"] > 0


def test_a_changed_weight_changes_the_answers(tmp_path: Path) -> None:
    directory = checkpoint("gptj", tmp_path)
    expected = generate(directory, PROMPTS, TOKENS)
    adapter = load(directory)
    with torch.no_grad():
        adapter.library_decoder.get_submodule("h.1.ln_1").get_parameter("weight")[:8].mul_(-1)
    assert Served(adapter).run(PROMPTS, TOKENS) != expected


@pytest.mark.parametrize("kind", ["bart", "trocr"])
def test_positions_that_are_counted_by_the_cache_are_noticed(kind: str, tmp_path: Path) -> None:
    """Sequences of one batch stand at places of their own: by the config, and at load where it does not say it."""
    small = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    adapter = load(make(kind, tmp_path, **small))
    config = adapter.library_decoder.config.to_dict()
    with pytest.raises(ConfigError, match="counts positions by its cache"):
        claims({**config, "architectures": [f"{kind}ForCausalLM"]}, tmp_path)
    with pytest.raises(ConfigError, match="run in pieces differs"):
        Served(adapter)


def test_what_does_not_go_with_it_is_refused(tmp_path: Path) -> None:
    directory = checkpoint("stablelm", tmp_path)
    with pytest.raises(ConfigError, match="uses its own attention, which cannot be made deterministic"):
        Served(load(directory), deterministic=True)
    with pytest.raises(ConfigError, match="uses its own attention, which does not support lora"):
        load(directory, lora=LoraPlan({}, 1, 8))
    directory = make("falcon", tmp_path / "alibi", tie_word_embeddings=False, **KINDS["falcon"], alibi=True)
    with pytest.raises(ConfigError, match="different results"):
        load(directory)
