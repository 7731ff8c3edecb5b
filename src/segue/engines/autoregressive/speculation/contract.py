"""Interfaces between drafters and networks: heads trained for a target, and a target that exposes its internals."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from segue.engines.autoregressive.contract import KVSpec


@runtime_checkable
class OpenTarget(Protocol):
    """A target stage model that exposes its decoder, a module of transformers, to EAGLE-3 and multi-token
    prediction."""

    library_decoder: nn.Module
    """With `layers`, `rotary_emb` and `config`, like every decoder of the library."""


class ParallelHeads(Protocol):
    """Heads that each predict one of the next tokens from the same hidden state (Medusa: Cai et al., 2024)."""

    weight_bytes: int
    count: int

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] final hidden states of the target → [rows, count, vocab] float32. `hidden` of token i gives
        token i + 2 + j at index j."""


class ChainHead(Protocol):
    """A small decoder that drafts token by token from hidden states (EAGLE: Li et al., 2024; multi-token prediction:
    arXiv 2412.19437, §2.2). Its input i is the hidden state of token i with token i + 1; its output predicts token
    i + 2.
    """

    weight_bytes: int
    kv: KVSpec

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] final hidden states of the target's step → the input of `forward`: [tokens, width]."""

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, paged: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, width] of the target or [n, hidden] of its own, [n] ids of the next tokens, [n] positions, the step →
        ([n, hidden] its own hidden states, to continue from; [n, hidden] the input of `logits`)."""

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32, -inf for tokens that it cannot draft."""
