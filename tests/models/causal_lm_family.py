"""Tiny causal LMs of many kinds, transformers' answers on them, and the engine over the family's own adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from made_engine import engine_over

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import StageRequest
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.shared.library import AutoConfig, AutoModelForCausalLM
from segue.models.shared.tiny.weights import prefer, randomise
from segue.models.text.causal_lm import tiny
from segue.models.text.causal_lm.llm import LLM
from segue.models.text.causal_lm.tiny_config import SMALL

VOCAB = 640
"""Prompts are made of ids below it: no special tokens."""
END = 645
_SHARED: dict[str, Any] = {
    "vocab_size": 672,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 640,
    "eos_token_id": END,
    "pad_token_id": 641,
}
OTHERS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.25},
    "glm4": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "final_logit_softcapping": 5.0},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "olmo": {},
    "olmo3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "starcoder2": {"sliding_window": 24},
    "phi": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "ernie4_5": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "exaone4": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 4,
        "attention_chunk_size": 32,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 650,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 5.0,
    },
    "modernbert-decoder": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "nemotron": {"head_dim": 16},
    "diffllama": {"head_dim": 16},
    "hrm_text": {"head_dim": 16, "prefix_lm": False, "H_cycles": 2, "L_cycles": 2, "tie_word_embeddings": False},
    "longcat_flash": {
        "num_layers": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 16,
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 48,
        "routed_scaling_factor": 1.0,
    },
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
"""By model type: what differs from `_SHARED`."""
KINDS = (*SMALL, *OTHERS)
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
_MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16}
_LATENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
STATES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 16, "expand": 2, "time_step_rank": 8},
    "falcon_mamba": {"state_size": 16, "expand": 2, "time_step_rank": 8},
    "mamba2": {**_MAMBA2, "time_step_limit": (0.0, float("inf"))},
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "lfm3": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "kimi_linear": {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4},
    "bailing_hybrid": {
        **_LATENT,
        "head_dim": 16,
        "q_lora_rank": 16,
        "num_mtp_layers": 0,
        "n_group": 1,
        "topk_group": 1,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "mamba_expand": 2},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "head_dim": 16,
    },
}
"""The same for those whose layers keep a state per sequence."""
_END_GAINS = {"bloom": 2.5, "nemotron_h": 3.5, "falcon_mamba": 2.5, "kimi_linear": 3.0, "lfm3": 2.3}
"""2.0 for others."""


def make(kind: str, directory: Path, **changes: Any) -> Path:
    """A checkpoint of a preset or of one of `OTHERS`."""
    if kind in SMALL and not changes:
        tiny.make(kind, directory)
        return directory
    config = AutoConfig.for_model(kind, **{**_SHARED, **OTHERS.get(kind, {}), **STATES.get(kind, {}), **changes})
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, 0, embedding_std=0.125 if kind.startswith("gemma") else 1.0)  # these multiply by 8
    prefer(model, list(range(VOCAB)), END, _END_GAINS.get(kind, 2.0))
    model.save_pretrained(directory)
    return directory


def load(directory: Path, **context: Any) -> LLM:
    values: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, **context}
    return LLM(AutoregressiveContext(directory, "llm", **values))


def prompts() -> list[list[int]]:
    """30 of 10 lengths; some begin alike, so that they share blocks."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 3, 7, 8, 13, 20, 31, 40, 57, 90)
    shared = torch.randint(0, VOCAB, (40,), generator=generator).tolist()
    made = []
    for length in lengths:
        for _ in range(3):
            own = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
            made.append([*shared, *own][:length] if length > 50 else own)
    return made


def generate(directory: Path, given: Sequence[Sequence[int]], tokens: int, **options: Any) -> list[list[int]]:
    """The library's own answers, greedy; prompts of one length in one call, so that nothing is padded."""
    with torch.inference_mode():
        # eager: in some versions the library's sdpa leaves soft caps out (Gemma 2)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        answers: dict[int, list[int]] = {}
        for length in {len(prompt) for prompt in given}:
            which = [index for index, prompt in enumerate(given) if len(prompt) == length]
            ids = torch.tensor([list(given[index]) for index in which])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, **options
            )
            ends = model.generation_config.eos_token_id
            ends = {ends} if isinstance(ends, int) else set(ends or ())
            for index, row in zip(which, out[:, length:].tolist(), strict=True):
                stop = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
                answers[index] = row[:stop]
    return [answers[index] for index in range(len(given))]


def varied(directory: Path, given: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The library's answers to prompts, which must tell a model that reads them from one that does not."""
    answers = generate(directory, given, tokens)
    several = [tuple(answer) for answer in answers if len(answer) > 2]
    assert len(several) > 15
    assert len(set(several)) == len(several), "the weights must make inputs matter"
    assert len({token for answer in several for token in answer}) > 50
    assert sum(answer.count(answer[-1]) == 1 and len(answer) < tokens for answer in answers) > 2, "some end"
    return answers


class Served:
    """An engine over an adapter."""

    def __init__(self, adapter: Any, *, ahead: bool | None = None, **config: Any) -> None:
        self.adapter = adapter
        sizes = AutoregressiveConfig(**{"num_blocks": 512, "block_size": 8, "max_batch": 32, **config})
        self.engine = engine_over(adapter, sizes, ahead=ahead)

    def run(self, given: Sequence[Sequence[int]], tokens: int, **sampling: Any) -> list[list[int]]:
        """Greedy answers of all prompts at once."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, **sampling).over(FALLBACK)
        answers: list[list[int]] = [[] for _ in given]
        for index, prompt in enumerate(given):
            request = StageRequest(
                str(index),
                "llm",
                Request(request_id=str(index)),
                params,
                seed=0,
                upstreams=frozenset({"input"}),
                downstreams=frozenset(),
                to_client=frozenset(),
            )
            self.engine.add(request)
            self.engine.feed(str(index), "input", {"token_ids": torch.tensor(prompt)}, final=True)
        while self.engine.has_work():
            outputs: list[TokenOutput] = self.engine.step()
            self.engine.audit()
            for output in outputs:
                assert output.error is None, output.error
                answers[int(output.request_id)] += output.token_ids
        return answers


def add(served: Served, request_id: str, adapter: str | None, prompt: Sequence[int], params: SamplingParams) -> None:
    """A request, with an adapter or without."""
    request = StageRequest(
        request_id,
        "llm",
        Request(request_id=request_id, adapter=adapter),
        params,
        seed=0,
        upstreams=frozenset({"input"}),
        downstreams=frozenset(),
        to_client=frozenset(),
    )
    served.engine.add(request)
    served.engine.feed(request_id, "input", {"token_ids": torch.tensor(list(prompt))}, final=True)
