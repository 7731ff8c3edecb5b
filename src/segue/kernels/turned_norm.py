"""RMS norms of queries and keys and their rotary positions (pairs of neighbours as complex numbers), in place, in one
pass. On two cores of an EPYC (Zen 5), 2 rows of 272 tokens, queries and keys of 6 heads of 64 features, beside torch:
265 → 165 µs."""

from __future__ import annotations

import torch

from segue.kernels.native import Library


def norm_and_turn(
    compiled: Library | None, x: torch.Tensor, weight: torch.Tensor, eps: float, turns: torch.Tensor | None
) -> None:
    """x [batch, tokens, heads, features], heads and features next to each other: RMS norms of the features with
    `weight` [features], then multiplied by `turns`, [tokens, features / 2] complex, where there are any. By torch where
    nothing is `compiled`, and of what is not float32 on a CPU."""
    batch, tokens, heads, width = x.shape
    assert x.stride()[2:] == (width, 1)
    if compiled is None or x.dtype != torch.float32 or x.device.type != "cpu":
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width)
        x.mul_(squares.add_(eps).rsqrt_()).mul_(weight)
        if turns is not None:
            torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(turns[:, None])
        return
    turned = None if turns is None else torch.view_as_real(turns.to(torch.complex64).contiguous())
    weight = weight.float().contiguous()
    compiled.turn(
        *(compiled.number, x.data_ptr(), x.stride(0), x.stride(1), weight.data_ptr(), eps),
        *(0 if turned is None else turned.data_ptr(), batch, tokens, heads, width, torch.get_num_threads()),
    )
