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
    mixed_experts = staticmethod(experts.mixed_experts)
    draw_codes = staticmethod(draw.draw_codes)
    most_codes = draw.MOST_CODES
    snake = staticmethod(snake.snake)
    Attention = NativeAttention

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

    def attention(self) -> NativeAttention:
        """A new attention backend, for any dtype."""
        return NativeAttention(self._library)

    def replayer(self) -> CpuRecorder:
        """For networks of any dtype."""
        return CpuRecorder(self._library)

    def capture(self) -> Capture[Any]:
        """For decode steps whose attention is `attention`."""
        return list_capture(self._library)
