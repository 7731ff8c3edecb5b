"""Layer norms whose scale and shift come with each row (Peebles & Xie, DiT, 2022, "adaptive layer norm"), in one pass.

On two cores of an AMD EPYC, of 384 features, beside torch's norm and `addcmul`: 1 row of 256 tokens 45 → 29 µs, 2
of them 180 → 46 µs, 16 of them 1325 → 275 µs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from segue.kernels.native import Library


def modulated_norm(
    compiled: Library | None, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    """Layer norm of x [batch, tokens, features] times `1 + scale`, plus `shift`, [batch, 1, features] each; by torch
    where nothing is `compiled`, and of what is not float32 on a CPU."""
    batch, tokens, width = x.shape
    if compiled is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return torch.addcmul(shift, functional.layer_norm(x, (width,), eps=eps), 1 + scale)
    x = x.contiguous()
    if scale.stride(0) != shift.stride(0) or scale.stride(2) != 1 or shift.stride(2) != 1:
        scale, shift = scale.contiguous(), shift.contiguous()
    y = torch.empty_like(x)
    compiled.modulate(
        *(compiled.number, x.data_ptr(), scale.data_ptr(), shift.data_ptr(), scale.stride(0), eps),
        *(y.data_ptr(), batch, tokens, width, torch.get_num_threads()),
    )
    return y
