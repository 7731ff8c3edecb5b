"""Mixtures of experts on a CPU: all experts of a layer in one call, which can be replayed."""

from __future__ import annotations

import ctypes

import torch

from segue.kernels.cpu.native import Experts, Library, library
from segue.kernels.cpu.panels import kind_of


def mixed_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    both: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    inner: int,
    compiled: Library | None = None,
) -> torch.Tensor:
    """The sum of what each token's experts give, weighted: x [tokens, hidden] float32, chosen [tokens, k] long and
    their shares → [tokens, hidden].

    An expert gives `down(silu(gate(x)) * up(x))`, with `inner` features between. `both` (gate, then up) and `down`:
    panels of all experts [experts, panels, in, panel], or [.., in / 2, ..] of bfloat16, and their bias [experts,
    panels * panel]. A token's result does not depend on the other tokens. `compiled`: the best instruction set by
    default.
    """
    compiled = compiled or library()
    assert compiled is not None
    x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.to(x.dtype).contiguous()
    tokens, hidden = x.shape
    k, experts = chosen.shape[1], len(both[0])
    rows, y = x.new_empty(tokens, hidden), x.new_empty(tokens, hidden)
    gates, gated, mixed = x.new_empty(tokens, 2 * inner), x.new_empty(tokens, inner), x.new_empty(tokens * k, hidden)
    order = chosen.new_empty(tokens * k + experts + 1)
    if not tokens:
        return y
    of = Experts(
        *(tensor.data_ptr() for tensor in (x, chosen, shares, *both, *down)),
        *(tensor.stride(0) for tensor in (*both, *down)),
        *(kind_of(both[0].shape[2], hidden), kind_of(down[0].shape[2], inner), tokens, hidden, inner, k, experts),
        *(tensor.data_ptr() for tensor in (rows, gates, gated, mixed, order, y)),
    )
    compiled.experts(compiled.number, ctypes.byref(of), torch.get_num_threads())
    return y
