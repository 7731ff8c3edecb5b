"""Fuse the operations between the network's matmuls and attention into fewer passes over memory.

In float32 on a CPU, a call's matmuls run near the machine's peak, and much of the remaining time goes to reading and
writing tensors for cheap operations. So q, k and v of text and image are concatenated once, RMSNorm and RoPE run on
them in place, adaLN modulation is fused into the norm before it, and gates into the residual sum after it. Results
change by rounding alone. The layers are those of the library's blocks, under their own names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from segue.engines.diffusion.contract import DenoiserContext
from segue.kernels.operations import attention, joined_product, modulated_norm, norm_and_rope
from segue.kernels.prepare import Plan, prepare
from segue.models.shared.diffusion.denoiser.teacache import modulated_by_image, signal_of
from segue.models.shared.diffusion.library import (
    Attention,
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformerBlock,
    RMSNorm,
    TransformerBlockMetadata,
    TransformerBlockRegistry,
    dispatch_attention_fn,
)


def foldable(ctx: DenoiserContext) -> bool:
    """Whether to fold a stage's network: undivided, in float32 on a CPU, and not compiled."""
    alone = ctx.tensor_parallel == ctx.sequence_parallel == 1
    return alone and ctx.fused and not ctx.compile and ctx.device.type == "cpu" and ctx.dtype == torch.float32


def fold(network: nn.Module, *, keep_modulations: bool) -> int:
    """Replace each unmodified block of the library's by a `FoldedBlock`; returns how many.

    `keep_modulations`: compute modulations once per timestep; must be off if their weights may change.
    """
    blocks: list[tuple[str, Any]] = [(name, module) for name, module in network.named_modules() if _foldable(module)]
    last = [module for module in network.modules() if isinstance(module, QwenImageTransformerBlock)][-1:]
    for name, block in blocks:
        network.set_submodule(name, FoldedBlock(block, last=block in last))
    if keep_modulations:
        widths = {name: block.img_norm1.normalized_shape[0] for name, block in blocks}
        repeated = {f"{name}.{leaf}": 6 * width for name, width in widths.items() for leaf in ("img_mod", "txt_mod")}
        prepare(network, next(network.parameters()).device, Plan(repeated=repeated))
    return len(blocks)


def _foldable(module: nn.Module) -> bool:
    return (
        type(module) is QwenImageTransformerBlock
        and not module.zero_cond_t
        and isinstance(module.attn, Attention)
        and type(module.attn.processor) is QwenDoubleStreamAttnProcessor2_0
        and all(type(norm) is RMSNorm for norms in _norms(module.attn) for norm in norms)
        and not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)
    )


def _norms(attn: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The norms of q and of k: the text's, and the image's."""
    return (attn.norm_added_q, attn.norm_q), (attn.norm_added_k, attn.norm_k)


class FoldedBlock(nn.Module):
    """`QwenImageTransformerBlock` for inference.

    B rows, T text tokens, P image tokens, D features.
    """

    attn: Attention
    img_mod: nn.Module
    img_norm1: nn.LayerNorm
    img_norm2: nn.LayerNorm
    img_mlp: nn.Module
    txt_mod: nn.Module
    txt_norm1: nn.LayerNorm
    txt_norm2: nn.LayerNorm
    txt_mlp: nn.Module

    def __init__(self, block: nn.Module, *, last: bool) -> None:
        """Takes over the layers of `block`, and replaces its attention processor. `last`: the block's text output is
        unused."""
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self.attn.set_processor(JointAttention(self.attn.processor))
        self._last = last

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image [B, P, D], text [B, T, D], text mask [B, T], timestep embedding [B, D] → text and image. Inputs are not
        modified."""
        before, behind = _modulations(self.img_mod(temb))
        text_before, text_behind = _modulations(self.txt_mod(temb))
        image, text = self.attn(
            hidden_states=_modulated(self.img_norm1, hidden_states, before),
            encoder_hidden_states=_modulated(self.txt_norm1, encoder_hidden_states, text_before),
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = torch.addcmul(hidden_states, before[2], image)
        image.addcmul_(behind[2], self.img_mlp(_modulated(self.img_norm2, image, behind)))
        if self._last:
            return encoder_hidden_states, image
        text = torch.addcmul(encoder_hidden_states, text_before[2], text)
        text.addcmul_(text_behind[2], self.txt_mlp(_modulated(self.txt_norm2, text, text_behind)))
        return text, image


TransformerBlockRegistry.register(
    FoldedBlock, TransformerBlockMetadata(return_hidden_states_index=1, return_encoder_hidden_states_index=0)
)

signal_of.register(FoldedBlock, lambda block: modulated_by_image)

_Modulation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Shift, scale and gate, [B, 1, D] each."""


def _modulations(made: torch.Tensor) -> tuple[_Modulation, _Modulation]:
    """[B, 6 D] → modulations of the attention, of the feed-forward layer."""
    shift, scale, gate, shift_2, scale_2, gate_2 = made[:, None].chunk(6, -1)
    return (shift, scale, gate), (shift_2, scale_2, gate_2)


def _modulated(norm: nn.LayerNorm, x: torch.Tensor, modulation: _Modulation) -> torch.Tensor:
    """Norm with adaLN modulation, [B, tokens, D]."""
    shift, scale, _ = modulation
    return modulated_norm(x, scale, shift, norm.eps)


class JointAttention:
    """`QwenDoubleStreamAttnProcessor2_0` for inference in float32: RMSNorm and RoPE run on q and k in place.

    B rows, T text tokens, P image tokens, S = T + P, H heads of C features, D = H C.
    """

    _parallel_config = None

    def __init__(self, instead_of: QwenDoubleStreamAttnProcessor2_0) -> None:
        self._attention_backend = instead_of._attention_backend
        """The library's attribute, which it sets on this processor."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image [B, P, D], text [B, T, D], text mask [B, T], RoPE factors [P, C / 2] and [T, C / 2], complex → image
        and text."""
        text = encoder_hidden_states.shape[1]
        added = joined_product((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), encoder_hidden_states)
        own = joined_product((attn.to_q, attn.to_k, attn.to_v), hidden_states)
        qkv = torch.cat([added, own], dim=1).unflatten(-1, (3, -1, attn.inner_dim // attn.heads))  # [B, S, 3, H, C]
        image_turns, text_turns = (None, None) if image_rotary_emb is None else image_rotary_emb
        for place, (text_norm, own_norm) in enumerate(_norms(attn)):
            norm_and_rope(qkv[:, :text, place], text_norm.weight, text_norm.eps, text_turns)
            norm_and_rope(qkv[:, text:, place], own_norm.weight, own_norm.eps, image_turns)
        mask = None
        if encoder_hidden_states_mask is not None:
            mask = functional.pad(encoder_hidden_states_mask, (0, hidden_states.shape[1]), value=True)[:, None, None]
        if self._attention_backend is None:
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            seen = attention(query, key, value, mask).transpose(1, 2)
        else:
            query, key, value = qkv.unbind(2)
            seen = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=self._attention_backend)
        seen = seen.flatten(2)
        # `to_out` continues with a dropout
        return attn.to_out[0](seen[:, text:].contiguous()), attn.to_add_out(seen[:, :text].contiguous())
