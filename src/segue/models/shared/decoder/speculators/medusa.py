"""Medusa heads (Cai et al., 2024, §2.1): residual blocks and a vocabulary projection for each of the next tokens.

Two published layouts. The authors': `medusa_lm_head.pt` or `.safetensors` with `{head}.{block}.linear.weight`, `.bias`
and `{head}.{blocks}.weight` (a `Sequential` of blocks and a projection). vLLM's: `model.safetensors` with
`blocks.{head}.layers.{block}.weight` and `lm_heads.{head}.weight`, over the tokens of `token_map` if present.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from segue.engines.autoregressive.contract import AutoregressiveModel
from segue.messages.errors import ConfigError
from segue.models.shared.decoder.speculators.weights import FIELD, FILES, read_tensors

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *FILES)
_THEIRS = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_BLOCK = re.compile(r"(?:medusa_heads?\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUT = re.compile(r"(?:medusa_heads?\.)?lm_heads\.(\d+)\.weight")


@dataclass(slots=True)
class _Head:
    blocks: list[tuple[torch.Tensor, torch.Tensor | None]]
    """Weight [hidden, hidden] and bias [hidden] of each block."""
    out: torch.Tensor
    """[vocab or mapped tokens, hidden]"""


class Medusa:
    """`ParallelHeads` of a checkpoint."""

    def __init__(self, directory: Path, target: AutoregressiveModel, dtype: torch.dtype) -> None:
        """Raises `ConfigError` for a checkpoint that has no Medusa heads, or none for this target."""
        tensors = read_tensors(directory, _FILES)
        self._map = tensors.pop("token_map", None)
        if self._map is not None:
            self._map = self._map.to(device=target.device, dtype=torch.long)
        self._vocab = target.vocab_size
        placed = {name: tensor.to(device=target.device, dtype=dtype) for name, tensor in tensors.items()}
        self._heads = _heads(placed, directory)
        self.count = len(self._heads)
        self.weight_bytes = sum(tensor.nbytes for tensor in placed.values())
        probe = torch.zeros(1, dtype=torch.long, device=target.device)
        hidden_size = target.embed(probe, None).shape[-1]
        rows = self._vocab if self._map is None else len(self._map)
        for number, head in enumerate(self._heads):
            wrong = [weight.shape for weight, _ in head.blocks if weight.shape != (hidden_size, hidden_size)]
            if wrong or head.out.shape != (rows, hidden_size):
                raise ConfigError(
                    f"{directory}: head {number} has blocks {[list(weight.shape) for weight, _ in head.blocks]} and a "
                    f"projection {list(head.out.shape)}; this model has hidden states of {hidden_size} and {rows} "
                    "tokens",
                    field=FIELD,
                )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, heads, vocab] float32."""
        made = []
        for head in self._heads:
            x = hidden
            for weight, bias in head.blocks:
                x = x + silu(linear(x, weight, bias))
            made.append(linear(x, head.out))
        logits = torch.stack(made, dim=1).float()
        if self._map is None:
            return logits
        return logits.new_full((*logits.shape[:2], self._vocab), float("-inf")).index_copy_(2, self._map, logits)


def _heads(tensors: dict[str, torch.Tensor], directory: Path) -> list[_Head]:
    weights: dict[tuple[int, int], torch.Tensor] = {}
    biases: dict[tuple[int, int], torch.Tensor] = {}
    outs: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if match := _THEIRS.fullmatch(name):
            place = int(match[1]), int(match[2])
            if match[3] == "weight":
                outs[place[0]] = tensor
            else:
                (weights if match[3] == "linear.weight" else biases)[place] = tensor
        elif match := _BLOCK.fullmatch(name):
            (weights if match[3] == "weight" else biases)[int(match[1]), int(match[2])] = tensor
        elif match := _OUT.fullmatch(name):
            outs[int(match[1])] = tensor
    if not outs or sorted(outs) != list(range(len(outs))):
        raise ConfigError(
            f"{directory}: no Medusa heads in the checkpoint; its tensors are {sorted(tensors)[:4]}, …", field=FIELD
        )
    return [
        _Head([(weights[key], biases.get(key)) for key in sorted(weights) if key[0] == head], outs[head])
        for head in sorted(outs)
    ]
