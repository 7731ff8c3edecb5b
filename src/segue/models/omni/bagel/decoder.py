"""The decoder: Qwen2's layers with two experts each, and a norm per head of queries and keys.

Rows of text and of seen images go through the *understanding* expert, rows of latents through the *generation* expert,
whose parameters end in `_moe_gen`. The experts share attention: every row sees the keys and values of both.

n rows, H hidden size, h heads, d head dimension. All tensors have a leading axis of 1, as the library's flat batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from segue.models.omni.bagel.config import LanguageConfig
from segue.models.omni.bagel.library import (
    ALL_ATTENTION_FUNCTIONS,
    BaseModelOutput,
    Cache,
    CausalLMOutput,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MLP,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
    apply_rotary_pos_emb,
    create_causal_mask,
)

_GENERATION = "_moe_gen"
BOTH = ("", _GENERATION)
"""What the names of an expert's parameters end in."""
UNDERSTANDING = ("",)


@dataclass(frozen=True, slots=True)
class Experts:
    """Which rows of a batch go to which expert."""

    understanding: Tensor
    """[rows] long."""
    generation: Tensor
    """[rows] long."""

    @classmethod
    def of(cls, generated: Tensor) -> Experts:
        """`generated`: [n] bool, true for rows of latents."""
        return cls((~generated).nonzero()[:, 0], generated.nonzero()[:, 0])

    def to(self, device: torch.device) -> Experts:
        """The same on a device."""
        return Experts(self.understanding.to(device), self.generation.to(device))


def routed(module: nn.Module, name: str, rows: Tensor, experts: Experts | None) -> Tensor:
    """[1, n, …] through the submodule `name` of each row's expert; None: all through the understanding expert."""
    understanding = module.get_submodule(name)
    if experts is None:
        out: Tensor = understanding(rows)
        return out
    understood = understanding(rows[:, experts.understanding])
    out = understood.new_empty(1, rows.shape[1], *understood.shape[2:])
    out[:, experts.understanding] = understood
    out[:, experts.generation] = module.get_submodule(name + _GENERATION)(rows[:, experts.generation])
    return out


class Attention(nn.Module):
    """Attention by the function that the config names (transformers' `AttentionInterface`)."""

    is_causal = True

    def __init__(self, config: Qwen2Config, layer: int, experts: Sequence[str]) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        for expert in experts:
            self.add_module(f"q_proj{expert}", nn.Linear(config.hidden_size, queries))
            self.add_module(f"k_proj{expert}", nn.Linear(config.hidden_size, keys))
            self.add_module(f"v_proj{expert}", nn.Linear(config.hidden_size, keys))
            self.add_module(f"o_proj{expert}", nn.Linear(queries, config.hidden_size, bias=False))
            self.add_module(f"q_norm{expert}", Qwen2RMSNorm(self.head_dim, eps=config.rms_norm_eps))
            self.add_module(f"k_norm{expert}", Qwen2RMSNorm(self.head_dim, eps=config.rms_norm_eps))

    def forward(
        self,
        rows: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        experts: Experts | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """[1, n, H] → the same. `rotary`: cosines and sines [1, n, d]; `kwargs` go to the attention function."""
        q, k, v = (routed(self, f"{name}_proj", rows, experts).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        q, k = routed(self, "q_norm", q, experts), routed(self, "k_norm", k, experts)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotary)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        # whether the implementation may change, the library decides by finding this call in the source
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        mixed, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return routed(self, "o_proj", mixed.flatten(2), experts)


class Layer(nn.Module):
    """One layer: attention and SwiGLU, each after its norm."""

    def __init__(self, config: Qwen2Config, layer: int, experts: Sequence[str]) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, experts)
        for expert in experts:
            self.add_module(f"mlp{expert}", Qwen2MLP(config))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.add_module(norm + expert, Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self,
        rows: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        experts: Experts | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """[1, n, H] → the same; as `Attention`."""
        normed = routed(self, "input_layernorm", rows, experts)
        rows = rows + self.self_attn(normed, rotary, mask, experts, cache, **kwargs)
        return rows + routed(self, "mlp", routed(self, "post_attention_layernorm", rows, experts), experts)


class _Model(PreTrainedModel):
    config: Qwen2Config
    config_class = Qwen2Config
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["Layer"]
    _supports_sdpa = True
    _supports_attention_backend = True


class Decoder(_Model):
    """Embedding, layers and final norm."""

    def __init__(self, config: Qwen2Config, experts: Sequence[str] = BOTH) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index, experts) for index in range(config.num_hidden_layers))
        for expert in experts:
            self.add_module(f"norm{expert}", Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.rotary_emb = Qwen2RotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        experts: Experts | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """[1, n] ids or [1, n, H] rows → final hidden states [1, n, H].

        `position_ids`: [1, n], by default 0 to n - 1; all rows of an image have the same one. `attention_mask`:
        [1, 1, n, keys], by default causal. `experts`: if some rows are latents. `past_key_values`: keys and values
        before these, to which theirs are appended."""
        rows = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(rows.shape[1], device=rows.device)[None]
        mask = create_causal_mask(self.config, rows, attention_mask, past_key_values=past_key_values)
        rotary = self.rotary_emb(rows, position_ids)
        for layer in self.layers:
            rows = layer(rows, rotary, mask, experts, past_key_values, **kwargs)
        return BaseModelOutput(last_hidden_state=routed(self, "norm", rows, experts))


class LanguageModel(_Model):
    """The decoder and the head that maps final hidden states of text to logits."""

    def __init__(self, config: Qwen2Config, experts: Sequence[str] = BOTH) -> None:
        super().__init__(config)
        self.model = Decoder(config, experts)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        """As `Decoder`; logits [1, n, vocab]."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, **kwargs).last_hidden_state))


def language_model(config: LanguageConfig, experts: Sequence[str] = BOTH) -> LanguageModel:
    """The network that a checkpoint's config describes, without weights. `experts`: UNDERSTANDING alone needs half of
    the parameters, and cannot draw."""
    return LanguageModel(
        Qwen2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        ),
        experts,
    )
