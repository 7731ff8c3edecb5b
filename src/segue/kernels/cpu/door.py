"""What the other kernels use of this package, if its kernels are compiled."""

from __future__ import annotations

from typing import Any

import torch

from segue.kernels.cpu import draw, experts, full_attention, gated_mlp, grouped, norms, panels, rounded_linear, snake
from segue.kernels.cpu.native import library
from segue.kernels.cpu.native_attention import NativeAttention
from segue.kernels.cpu.network_recorder import CpuRecorder, list_capture
from segue.kernels.graphs.replay import Capture


class CpuKernels:
    """Functions on float32 tensors on a CPU, except where they say otherwise."""

    laid_out = staticmethod(panels.laid_out)
    panel_gemm = staticmethod(panels.panel_gemm)
    are_words = staticmethod(grouped.are_words)
    four_bits_from_zero = staticmethod(grouped.four_bits_from_zero)
    grouped_panels = staticmethod(grouped.grouped_panels)
    grouped_gemm = staticmethod(grouped.grouped_gemm)
    read_words = staticmethod(grouped.read_words)
    rounded = staticmethod(rounded_linear.rounded)
    of_scales = staticmethod(rounded_linear.of_scales)
    fuse_norms = staticmethod(norms.fuse_norms)
    fuse_gates = staticmethod(gated_mlp.fuse_gates)
    compile_attention = staticmethod(full_attention.compile_attention)
    full_attention = staticmethod(full_attention.full_attention)
    Attention = NativeAttention
    most_codes = draw.MOST_CODES

    def __init__(self) -> None:
        compiled = library()
        assert compiled is not None
        self._library = compiled

    def modulated_norm(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
        """As in `segue.kernels.operations`."""
        return norms.modulated_norm(self._library, x, scale, shift, eps)

    def norm_and_rope(self, x: torch.Tensor, weight: torch.Tensor, eps: float, rotations: torch.Tensor | None) -> None:
        """As in `segue.kernels.operations`."""
        norms.norm_and_rope(self._library, x, weight, eps, rotations)

    def draw_codes(
        self,
        logits: torch.Tensor,
        numbers: torch.Tensor,
        greedy: torch.Tensor,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `segue.kernels.operations`, for at most `most_codes`."""
        return draw.draw_codes(
            self._library, logits, numbers, greedy, temperature=temperature, top_k=top_k, top_p=top_p
        )

    def mixed_experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        both: tuple[torch.Tensor, torch.Tensor],
        down: tuple[torch.Tensor, torch.Tensor],
        inner: int,
    ) -> torch.Tensor:
        """As in `experts`."""
        return experts.mixed_experts(self._library, x, chosen, shares, both, down, inner)

    def snake(self, x: torch.Tensor, frequencies: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """As in `segue.kernels.operations`."""
        return snake.snake(self._library, x, frequencies, shares)

    def attention(self) -> NativeAttention:
        """A new attention backend, for any dtype."""
        return NativeAttention(self._library)

    def replayer(self) -> CpuRecorder:
        """For networks of any dtype."""
        return CpuRecorder(self._library)

    def capture(self) -> Capture[Any]:
        """For decode steps whose attention is `attention`."""
        return list_capture(self._library)
