"""EAGLE heads (Li et al., 2024; EAGLE-3: Li et al., 2025): a decoder layer over the target's hidden states.

EAGLE-1 and -2: `fc` joins a token's embedding with the final hidden state of the previous token; a Llama layer, the
first one without its input norm, estimates the next hidden state, which the target's own head reads.

EAGLE-3: `fc` joins the target's hidden states at three depths. The first layer's attention takes embedding and hidden
state concatenated, each after a norm; `norm` and a head of its own follow, often over fewer tokens (`d2t`: the offset
from a draft id to the target's).

Published names: `midlayer.*` or `layers.{i}.*`, `fc.*`, `norm.weight`, `lm_head.weight`, `d2t`, `embed_tokens.weight`,
with or without the prefix `model.`, in `model.safetensors` or `pytorch_model.bin`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.engines.autoregressive.contract import AutoregressiveModel, KVSpec
from segue.engines.autoregressive.speculation.contract import OpenTarget
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.speculators.library import (
    FLAT,
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from segue.models.shared.decoder.speculators.tap import Tap
from segue.models.shared.decoder.speculators.weights import FIELD, FILES, filled, read_tensors, read_values

_ZEROS = (".bias",)
"""Some checkpoints have biases on q, k and v only; the library's module has one on o as well."""


class _First(LlamaDecoderLayer):
    """EAGLE-1: a layer without input norm."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.input_layernorm = nn.Identity()


class _Wide(LlamaDecoderLayer):
    """EAGLE-3: attention over concatenated embedding and hidden state."""

    def __init__(self, config: LlamaConfig, layer_idx: int, *, norm_before_residual: bool) -> None:
        super().__init__(config, layer_idx)
        attention, width = self.self_attn, 2 * config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = attention.get_submodule(name)
            assert isinstance(narrow, nn.Linear)
            setattr(attention, name, nn.Linear(width, narrow.out_features, bias=narrow.bias is not None))
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def join(self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Any, paged: Any) -> torch.Tensor:
        """[1, n, hidden] twice → [1, n, hidden]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        mixed, _ = self.self_attn(hidden_states=both, position_embeddings=rope, attention_mask=None, paged=paged)
        hidden = residual + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Network(nn.Module):
    def __init__(self, config: LlamaConfig, tensors: dict[str, torch.Tensor], *, third: bool, wide: bool) -> None:
        super().__init__()
        fc = tensors["fc.weight"]
        self.fc = nn.Linear(fc.shape[1], fc.shape[0], bias="fc.bias" in tensors)
        first: LlamaDecoderLayer = _Wide(config, 0, norm_before_residual=wide) if third else _First(config, 0)
        if not third and "layers.0.input_layernorm.weight" in tensors:
            first = LlamaDecoderLayer(config, 0)
        others = [LlamaDecoderLayer(config, place) for place in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *others])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) if third else nn.Identity()
        if "embed_tokens.weight" in tensors:
            self.embed_tokens = nn.Embedding(*tensors["embed_tokens.weight"].shape)
        if third and "lm_head.weight" in tensors:
            self.lm_head = nn.Linear(config.hidden_size, len(tensors["lm_head.weight"]), bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)


class Eagle:
    """`ChainHead` of a checkpoint: EAGLE-1/2 or EAGLE-3, distinguished by their tensors."""

    def __init__(self, directory: Path, target: AutoregressiveModel, dtype: torch.dtype) -> None:
        """Raises `ConfigError` for a checkpoint that is not an EAGLE head, or not for this target."""
        tensors = {_plain(name): tensor for name, tensor in read_tensors(directory, FILES).items()}
        if "fc.weight" not in tensors:
            raise ConfigError(f"{directory}: no tensor 'fc.weight', so this is not an EAGLE head", field=FIELD)
        values = read_values(directory)
        third = "layers.0.hidden_norm.weight" in tensors
        config = _config(values, tensors)
        wide = bool(values.get("norm_before_residual"))  # EAGLE's own key, which Llama's config does not have
        network = filled(
            lambda: _Network(config, tensors, third=third, wide=wide),
            tensors,
            where=str(directory),
            device=target.device,
            dtype=dtype,
            optional=_ZEROS,
        )
        self._network, self._target, self._third = network, target, third
        self._embed = "embed_tokens.weight" in tensors
        self._own_head = third and "lm_head.weight" in tensors
        self._places = self._draft_places(tensors) if self._own_head else None
        self._tap = self._tapped(values, target) if third else None
        self.inner = third
        """It starts from hidden states of inner layers."""
        self._check(config, tensors)
        self.weight_bytes = held_bytes(network)
        attention: Any = network.get_submodule("layers.0.self_attn")
        self.kv = KVSpec(config.num_hidden_layers, config.num_key_value_heads, attention.head_dim, dtype)

    def _check(self, config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> None:
        if not self._own_head:
            probe = torch.zeros(1, dtype=torch.long, device=self._target.device)
            width = self._target.embed(probe, None).shape[-1]
            if config.hidden_size != width:
                raise ConfigError(
                    f"hidden_size of this EAGLE head is {config.hidden_size}; the model's is {width}", field=FIELD
                )
        if self._embed and len(tensors["embed_tokens.weight"]) < self._target.vocab_size:
            raise ConfigError(
                f"this EAGLE head embeds {len(tensors['embed_tokens.weight'])} tokens; the model has "
                f"{self._target.vocab_size}",
                field=FIELD,
            )

    def _draft_places(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """[draft vocab] the target's id of each draft token; None if they are equal."""
        count = len(tensors["lm_head.weight"])
        places = torch.arange(count)
        if "d2t" in tensors:
            places += tensors["d2t"].long().cpu()
        elif count == self._target.vocab_size:
            return None
        if not bool(((places >= 0) & (places < self._target.vocab_size)).all()):
            raise ConfigError(
                f"this EAGLE head drafts tokens up to {int(places.max())}; the model has {self._target.vocab_size}",
                field=FIELD,
            )
        return places.to(self._target.device)

    def _tapped(self, values: dict[str, Any], target: AutoregressiveModel) -> Tap:
        if not isinstance(target, OpenTarget):
            raise ConfigError(
                "an EAGLE-3 head needs hidden states of inner layers, which this stage does not provide", field=FIELD
            )
        layers = target.library_decoder.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        count = len(layers)
        chosen = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        places = list(chosen or (2, count // 2, count - 3))
        if not all(0 <= place < count for place in places):
            raise ConfigError(f"this EAGLE head needs layers {places}; the model has {count}", field=FIELD)
        return Tap([layers[place] for place in places])

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → the starting states of `forward`: [tokens, hidden]."""
        return hidden if self._tap is None else self._network.fc(self._tap.rows().to(self._network.fc.weight.dtype))

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, paged: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        network = self._network
        embeds = (network.embed_tokens(token_ids) if self._embed else self._target.embed(token_ids, None))[None]
        rope = network.rotary_emb(embeds, positions[None])
        first, *others = network.layers
        if isinstance(first, _Wide):
            x = first.join(embeds, hidden[None], rope, paged)
        else:
            x = network.fc(torch.cat([embeds, hidden[None]], dim=-1))
            x = first(x, position_embeddings=rope, attention_mask=None, paged=paged)
        for layer in others:
            x = layer(x, position_embeddings=rope, attention_mask=None, paged=paged)
        return x[0], network.norm(x)[0]

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        if not self._own_head:
            return self._target.logits(out)
        logits = self._network.lm_head(out).float()
        if self._places is None:
            return logits
        return logits.new_full((len(out), self._target.vocab_size), float("-inf")).index_copy_(1, self._places, logits)


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _config(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> LlamaConfig:
    known = {key: value for key, value in values.items() if key not in ("model_type", "architectures", "auto_map")}
    known["attention_bias"] = "layers.0.self_attn.q_proj.bias" in tensors
    try:
        config = LlamaConfig(**known)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json of this EAGLE head is not Llama's: {error}", field=FIELD) from error
    config._attn_implementation = FLAT
    return config
