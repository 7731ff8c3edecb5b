"""Multi-token prediction with a model's own module (DeepSeek-V3, §2.2): its layer, its norms, its projection.

The layer is of the class of the decoder's own layers, so the module runs for any library architecture whose layers the
engine supports. If a model has several modules, the first is used repeatedly, as its authors suggest for longer drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.engines.autoregressive.contract import AutoregressiveModel, KVSpec
from segue.engines.autoregressive.speculation.contract import OpenTarget
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.checkpoint import Checkpoint, held_bytes
from segue.models.shared.decoder.speculators.weights import filled

_FIELD = "speculation.method"


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor names of a published layout, below `prefix`."""

    prefix: str
    embed_norm: str
    hidden_norm: str
    join: str
    """Projection of embedding and hidden state, [2 * hidden] → [hidden]."""
    layer: str
    """Prefix of the decoder layer's names."""
    norm: str
    hidden_first: bool = False
    """`join` takes the hidden state first, else the embedding."""
    normed_on: bool = True
    """The next draft continues from the state after the norm."""
    head: str | None = None
    """The module's own vocabulary projection, if any."""


def layouts(layers: int) -> tuple[Layout, ...]:
    """DeepSeek-V3 and GLM-4.5; Qwen3-Next; MiMo. `layers`: number of the decoder's layers."""
    return (
        Layout(
            prefix=f"model.layers.{layers}.",
            embed_norm="enorm",
            hidden_norm="hnorm",
            join="eh_proj",
            layer="",
            norm="shared_head.norm",
            normed_on=False,
            head="shared_head.head",
        ),
        Layout(
            prefix="mtp.",
            embed_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            join="fc",
            layer="layers.0.",
            norm="norm",
        ),
        Layout(
            prefix="model.mtp_layers.0.",
            embed_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            join="input_proj",
            layer="",
            norm="final_layernorm",
            hidden_first=True,
        ),
    )


class _Network(nn.Module):
    def __init__(self, decoder: nn.Module, vocab_size: int | None) -> None:
        super().__init__()
        config: Any = decoder.config
        layers = decoder.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        last = len(layers) - 1
        self.layer = type(layers[last])(config, last)
        attention: Any = self.layer.get_submodule("self_attn")
        attention.layer_idx = 0  # it has its own cache
        # from the new layer: the decoder's own may have been replaced by a faster one
        norm, eps = type(self.layer.get_submodule("input_layernorm")), config.rms_norm_eps
        self.embed_norm = norm(config.hidden_size, eps=eps)
        self.hidden_norm = norm(config.hidden_size, eps=eps)
        self.norm = norm(config.hidden_size, eps=eps)
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        if vocab_size is not None:
            self.head = nn.Linear(config.hidden_size, vocab_size, bias=False)


class MultiToken:
    """`ChainHead` from the target's own checkpoint."""

    def __init__(self, directory: Path, target: AutoregressiveModel, dtype: torch.dtype) -> None:
        """Raises `ConfigError` if the checkpoint has no module, or an unsupported one."""
        if not isinstance(target, OpenTarget):
            raise ConfigError("this stage's decoder has no usable multi-token prediction", field=_FIELD)
        checkpoint = Checkpoint(directory)
        decoder: Any = target.library_decoder
        found = [way for way in layouts(len(decoder.layers)) if f"{way.prefix}{way.join}.weight" in checkpoint]
        if not found:
            raise ConfigError(
                f"speculation.method is 'mtp', but {str(directory)!r} has no multi-token-prediction module",
                field=_FIELD,
            )
        self._layout = layout = found[0]
        self._target = target
        names = _names(layout, checkpoint)
        vocab = target.vocab_size if "head.weight" in names else None
        self._own_head = vocab is not None
        try:
            self._network = filled(
                lambda: _Network(decoder, vocab),
                {name: checkpoint.read(source) for name, source in names.items()},
                where=f"{directory}, multi-token prediction",
                device=target.device,
                dtype=dtype,
            )
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"this model's multi-token prediction cannot be run: {error}", field=_FIELD) from error
        self._rotary = decoder.rotary_emb
        self.weight_bytes = held_bytes(self._network)
        attention: Any = self._network.layer.get_submodule("self_attn")
        heads = attention.k_proj.out_features // attention.head_dim
        self.kv = KVSpec(1, heads, attention.head_dim, dtype)

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, paged: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        network = self._network
        pair = [network.embed_norm(self._target.embed(token_ids, None)), network.hidden_norm(hidden)]
        x = network.join(torch.cat(pair[::-1] if self._layout.hidden_first else pair, dim=-1))[None]
        rope = self._rotary(x, positions[None])
        x = network.layer(x, position_embeddings=rope, position_ids=positions[None], attention_mask=None, paged=paged)[
            0
        ]
        normed = network.norm(x)
        return (normed if self._layout.normed_on else x), normed

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        return self._network.head(out).float() if self._own_head else self._target.logits(out)


def _names(layout: Layout, checkpoint: Checkpoint) -> dict[str, str]:
    """Name in `_Network` → name in the checkpoint."""
    ours = {
        layout.embed_norm: "embed_norm",
        layout.hidden_norm: "hidden_norm",
        layout.join: "join",
        layout.norm: "norm",
    }
    if layout.head is not None:
        ours[layout.head] = "head"
    names = {}
    for source in checkpoint.names:
        if not source.startswith(layout.prefix):
            continue
        below = source.removeprefix(layout.prefix)
        module, _, parameter = below.rpartition(".")
        if module in ours:
            names[f"{ours[module]}.{parameter}"] = source
        elif below.startswith(layout.layer):
            names[f"layer.{below.removeprefix(layout.layer)}"] = source
    return names
