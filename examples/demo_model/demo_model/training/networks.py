"""The library's networks as the training calls them: in large batches, without a loop over pictures or recordings.

Its encoders attend within each picture or recording in a loop. The library has a place to plug in other functions for
attention and for experts; those here compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demo_model.data.prompts import CHUNK, FRAMES_PER_PATCH, MERGE, PATCH, ROWS, rows_of

from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration  # isort: skip # its shim first
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import sdpa_mask
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

__all__ = [
    "Qwen3OmniMoeForConditionalGeneration",
    "audio_encoder",
    "heard",
    "language_model",
    "prepare",
    "seen",
    "vision",
]

_FILLED = 128
"""An expert takes a multiple of so many tokens."""
_HIDDEN = -3e4
"""Added to the score of a token that must not be seen."""
_TOGETHER, _VISIBLE, _SORTED = "flash_demo_model", "visible_demo_model", "sorted_demo_model"
"""The library gives packed sequences whole to functions with "flash" in their name."""


def language_model(model: Any) -> Any:
    """The text decoder of the thinker; versions of the library hold it in different places."""
    inner = model.thinker.model
    return inner if hasattr(inner, "embed_tokens") else inner.language_model


def vision(model: Any) -> Any:
    thinker = model.thinker
    return thinker.visual if hasattr(thinker, "visual") else thinker.model.visual


def audio_encoder(model: Any) -> Any:
    thinker = model.thinker
    return thinker.audio_tower if hasattr(thinker, "audio_tower") else thinker.model.audio_tower


class _Patches(torch.nn.Conv3d):
    """A convolution of whole patches as one product, which is what it is: on a CPU ten times as fast."""

    def forward(self, patches: Tensor) -> Tensor:
        return functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


def prepare(model: Any, device: torch.device) -> None:
    """Move a model to the device and have it trained by the functions below; weights and results stay the same."""
    model.to(device).train()
    for encoder in (vision(model), audio_encoder(model)):
        encoder.config._attn_implementation = _TOGETHER  # the library's setter looks for a package of that name
    language_model(model).config._attn_implementation = _VISIBLE
    embed = vision(model).patch_embed
    whole = _Patches(embed.in_channels, embed.embed_dim, embed.proj.kernel_size, device="meta")
    whole.weight, whole.bias = embed.proj.weight, embed.proj.bias
    embed.proj = whole
    for decoder in (language_model(model), model.talker.model):
        decoder.config._experts_implementation = _SORTED


def attend_together(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **others: Any,
) -> tuple[Tensor, None]:
    """Bidirectional attention within each packed sequence: [1, heads, tokens, dim] → [1, tokens, heads, dim]."""
    count, heads, tokens = len(cu_seq_lens_q) - 1, query.shape[1], query.shape[2]
    packed = [states[0].transpose(0, 1) for states in (query, key, value)]
    place, known = None, None
    if count * max_length_q != tokens:  # lengths differ: fill up
        index = torch.arange(tokens, device=query.device)
        owner = torch.bucketize(index, cu_seq_lens_q[1:], right=True)
        place = owner * max_length_q + index - cu_seq_lens_q[owner]
        packed = [rows.new_zeros(count * max_length_q, *rows.shape[1:]).index_copy(0, place, rows) for rows in packed]
        lengths = cu_seq_lens_q.diff()[:, None]
        known = (torch.arange(max_length_q, device=query.device) < lengths)[:, None, None]
    split = (rows.unflatten(0, (count, max_length_q)).transpose(1, 2) for rows in packed)
    mixed = functional.scaled_dot_product_attention(*split, attn_mask=known, scale=scaling)
    rows = mixed.transpose(1, 2).reshape(count * max_length_q, heads, -1)
    return (rows if place is None else rows.index_select(0, place))[None], None


def attend_visible(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention to what a mask, bool [B, 1, tokens, tokens], shows, in the values' dtype: [B, heads, tokens, dim] → [B,
    tokens, heads, dim]. Heads that share keys are one product."""
    count, heads, tokens, dim = query.shape
    shared = key.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        rows = (query * scaling).to(value.dtype).reshape(count, shared, -1, dim)
        scores = (rows @ key.to(value.dtype).mT).view(count, heads, tokens, -1)
        shares = (scores + attention_mask.logical_not().to(value.dtype) * _HIDDEN).softmax(-1)
        mixed = (shares.view(count, shared, -1, shares.shape[-1]) @ value).view(count, heads, tokens, dim)
    return mixed.transpose(1, 2), None


def sorted_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each expert takes its tokens side by side: [tokens, hidden] → [tokens, hidden].

    Their number is filled up to a multiple of `_FILLED`: a CPU's kernels are compiled anew for each other number.
    """
    order = top_k_index.flatten().argsort(stable=True)
    owner = order // top_k_index.shape[1]
    counts = top_k_index.flatten().bincount(minlength=self.num_experts)
    filled = (counts + _FILLED - 1) // _FILLED * _FILLED
    shift = (filled.cumsum(0) - filled) - (counts.cumsum(0) - counts)
    place = torch.arange(len(order), device=order.device) + shift.index_select(0, top_k_index.flatten()[order])
    sizes = filled.tolist()
    rows = hidden_states.new_zeros(sum(sizes), hidden_states.shape[1])
    parts = rows.index_copy(0, place, hidden_states.index_select(0, owner)).split(sizes)
    both = torch.cat([functional.linear(*one) for one in zip(parts, self.gate_up_proj, strict=True)])
    gate, up = both.chunk(2, -1)
    parts = (self.act_fn(gate) * up).split(sizes)
    made = torch.cat([functional.linear(*one) for one in zip(parts, self.down_proj, strict=True)])
    made = (made.index_select(0, place) * top_k_weights.flatten()[order, None]).to(hidden_states.dtype)
    return torch.zeros_like(hidden_states).index_add(0, owner, made)


AttentionInterface.register(_TOGETHER, attend_together)
AttentionInterface.register(_VISIBLE, attend_visible)
AttentionMaskInterface.register(_VISIBLE, sdpa_mask)
ALL_EXPERTS_FUNCTIONS[_SORTED] = sorted_experts


def seen(model: Any, frames: Tensor) -> Any:
    """uint8 [pictures, frames, side, side, 3] → what the vision encoder gives of all of them."""
    pixels = patches(frames)
    grid = frames.shape[2] // PATCH
    count = len(pixels) // grid**2
    indices, weights, places = _of_one_picture(vision(model), grid, pixels.device)
    return vision(model)(
        pixels,
        grid_thw=torch.tensor([[count, grid, grid]]),
        interp_indices=indices.repeat(count, 1),
        interp_weights=weights.repeat(count, 1),
        position_ids=places.repeat(count, 1),
        cu_seqlens=torch.arange(count + 1, device=pixels.device, dtype=torch.int32) * grid**2,
        max_seqlen=grid**2,
    )


def patches(frames: Tensor) -> Tensor:
    """uint8 [pictures, frames, side, side, 3] → float32 [patches, 1536], as the library's processor gives them. One
    frame counts for two."""
    if frames.shape[1] == 1:
        frames = frames.expand(-1, FRAMES_PER_PATCH, -1, -1, -1)
    grid = frames.shape[2] // PATCH // MERGE
    size = (-1, frames.shape[1] // FRAMES_PER_PATCH, FRAMES_PER_PATCH, grid, MERGE, PATCH, grid, MERGE, PATCH, 3)
    values = (frames.float() / 127.5 - 1).reshape(size).permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
    return values.reshape(-1, 3 * FRAMES_PER_PATCH * PATCH**2)


@cache
def _of_one_picture(encoder: Any, grid: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shape = torch.tensor([[1, grid, grid]], device=device)
    indices, weights = get_vision_interpolation_indices_and_weights(
        shape,
        num_grid_per_side=encoder.num_grid_per_side,
        mode=encoder.interpolation_mode,
        align_corners=encoder.interpolation_align_corners,
        spatial_merge_size=encoder.spatial_merge_size,
    )
    return indices, weights, get_vision_position_ids(shape, encoder.spatial_merge_size)


def heard(model: Any, mels: Tensor, lengths: Sequence[int]) -> Tensor:
    """float32 [recordings, bins, spectra], zero beyond each one's length → [rows of all recordings, width].

    A recording shorter than `CHUNK` counts as one that others of the batch follow: it is filled up.
    """
    encoder = audio_encoder(model)
    spectra = functional.pad(mels, (0, -mels.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK)).transpose(1, 2)
    most, window = spectra.shape[1], ROWS * (encoder.n_window_infer // CHUNK)
    chunks, kept, ends = [], [], [0]
    for number, length in enumerate(lengths):
        for chunk in range(-(-length // CHUNK)):
            first = len(chunks) * ROWS
            kept += range(first, first + rows_of(min(length - chunk * CHUNK, CHUNK)))
            chunks.append(number * most + chunk)
        whole, rest = divmod(rows_of(length), window)
        ends += [window] * whole + [rest] * (rest > 0)
    chosen, valid, cut = (torch.tensor(one, device=mels.device) for one in (chunks, kept, ends))
    found: Tensor = encoder(
        mels,
        feature_lens=None,
        padded_feature=spectra.flatten(0, 1)[chosen],
        chunk_lengths=chosen,  # not read where what follows from them is given
        valid_indices=valid,
        cu_seqlens=cut.cumsum(0, dtype=torch.int32),
        max_seqlen=max(ends),
    ).last_hidden_state
    return found
