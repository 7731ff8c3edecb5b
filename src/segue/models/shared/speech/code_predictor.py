"""Draw the codes of a row after the first: a small decoder reads the talker's final hidden state and code 0, then each
code that it has drawn; a head per code.

n sequences, E width of the talker, P of the predictor, G codes per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from segue.engines.autoregressive.contract import Draws
from segue.kernels.prepare import Plan, prepare, siblings
from segue.models.shared.library import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Filters:
    """How codes are drawn, unless the request is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, draws: Draws, group: int, logits: torch.Tensor) -> torch.Tensor:
        """[n, codes] float32 logits of a group from 1 on → [n] codes."""
        return draws.code(group, logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class _FewRotations(nn.Module):
    """A library's rotary embedding, computed once for the few positions of a row."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, rotary: nn.Module, positions: int, like: torch.Tensor) -> None:
        """`like`: of the dtype and device of hidden states."""
        super().__init__()
        cos, sin = rotary(like, torch.arange(positions, device=like.device)[None])
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, t] → cosines and sines [1, t, dim]."""
        return self.cos[position_ids], self.sin[position_ids]


class CodePredictor:
    """Runs the library's decoder over the codes of one row."""

    def __init__(
        self,
        decoder: PreTrainedModel,
        embeddings: nn.ModuleList,
        heads: nn.ModuleList,
        filters: Filters,
        project: nn.Module | None = None,
    ) -> None:
        """`decoder` takes [n, t, P] embeddings; `embeddings` and `heads` are those of codes 1 to G - 1; `project` maps
        E to P if they differ."""
        decoder.set_attn_implementation("sdpa")
        self._decoder, self._embeddings, self._heads = decoder, embeddings, heads
        self._filters = filters
        self._project = project or nn.Identity()
        self._masks = dict.fromkeys(decoder.config.layer_types)  # None: causal
        like = embeddings[0].get_parameter("weight")
        decoder.rotary_emb = _FewRotations(decoder.rotary_emb, self.groups, like)
        self._positions = torch.arange(self.groups, device=like.device)[None]
        with torch.inference_mode(), siblings(decoder) as found:
            self._forward(like.new_zeros(1, 2, decoder.config.hidden_size), 0, None)
        prepare(decoder, decoder.device, Plan(recognised=True, shared=found))

    @property
    def groups(self) -> int:
        """G."""
        return 1 + len(self._heads)

    def embed(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """[n] codes of a group from 1 on → [n, E]."""
        rows: torch.Tensor = self._embeddings[group - 1](codes)
        return rows

    def _forward(self, embeds: torch.Tensor, begin: int, cache: DynamicCache | None) -> torch.Tensor:
        """[n, t, P] embeddings from position `begin` on → [n, t, P] final hidden states."""
        made: torch.Tensor = self._decoder(
            inputs_embeds=embeds,
            position_ids=self._positions[:, begin : begin + embeds.shape[1]],
            attention_mask=self._masks,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return made

    def __call__(self, hidden: torch.Tensor, first: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, E] final hidden states, [n, E] embeddings of codes 0 → [n, G - 1] long."""
        cache = DynamicCache(config=self._decoder.config)
        codes: list[torch.Tensor] = []
        rows = torch.stack([hidden, first], dim=1)
        for group in range(1, len(self._heads) + 1):
            out = self._forward(self._project(rows), 0 if group == 1 else group, cache)[:, -1]
            logits = self._heads[group - 1](out).float()
            codes.append(self._filters.draw(draws, group, logits))
            rows = self.embed(group, codes[-1])[:, None]
        return torch.stack(codes, dim=1)
