"""What drafters need of networks: heads trained for a target, and a target that lets them see inside."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from segue.engines.autoregressive.contract import KVSpec


@runtime_checkable
class OpenTarget(Protocol):
    """A target adapter whose decoder is a module of transformers: what EAGLE-3 and multi-token prediction look into."""

    library_decoder: nn.Module
    """With `layers`, `rotary_emb` and `config`, as every decoder of the library has them."""


class ParallelHeads(Protocol):
    """Heads that each guess one of the next tokens from the same hidden state (Medusa: Cai et al., 2024)."""

    weight_bytes: int
    count: int

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] final hidden states of the target → [rows, count, vocab] float32. `hidden` of token i gives,
        in place j, token i + 2 + j."""


class ChainHead(Protocol):
    """A small decoder that guesses one token after the other from hidden states (EAGLE: Li et al., 2024; multi-token
    prediction: arXiv 2412.19437, §2.2). Its input i is the hidden state of token i with token i + 1; it gives token
    i + 2.
    """

    weight_bytes: int
    kv: KVSpec

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] final hidden states of the target's step → what goes into `forward`: [tokens, width]."""

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, paged: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, width] of the target or [n, hidden] of its own, [n] ids of the tokens after, [n] positions, the step →
        ([n, hidden] its own hidden states, to go on from; [n, hidden] what `logits` takes)."""

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32, -inf for tokens it cannot guess."""
