"""Flow matching from codes to mel frames with Token2Wav's DiT, in blocks and in windows of an utterance.

The network attends block-wise: every layer sees its own block of `block_size` frames; some layers also see the next
block, some the previous one. Frames of any mix of requests, windows and guidance branches therefore form one flat batch
of blocks, without padding, if each block knows the rows of its two neighbours. The weights are those of
`Qwen2_5OmniToken2WavDiTModel`; this file runs its layers, with linear layers that share an input joined.

Values that stay constant over the solver's evaluations are computed once: the speaker encoder per voice, code
embeddings and their share of the input projection per window, rotary tables per window, time embeddings and all adaLN
modulations per time.

Shape legend: N blocks of one guidance branch · R rows = blocks of all branches · F frames per block · H heads ·
d head_dim · D hidden · M mel_dim · E evaluations of the network · W windows.

Optional reading: a network of the vocoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.kernels.operations import then_gelu
from segue.kernels.prepare import Plan, prepare

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import DiTDecoderLayer, Qwen2_5OmniToken2WavDiTModel

ROWS = 240
"""Frames of a typical call, both guidance branches; CPU linear layers choose their weight layout for it."""


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """Settings of the flow's integration; the defaults are those of the family's own `generate`."""

    num_steps: int = 10
    """Points of the time grid: one more than the steps, of four evaluations each."""
    guidance: float = 0.5
    sway: float = -1.0


@dataclass(frozen=True, slots=True)
class Voice:
    """A speaker's contribution to the input projection, the same for every frame and evaluation."""

    conditioned: Tensor
    """[D]: reference mel through the speaker encoder, speaker embedding, bias."""
    null: Tensor
    """[D]: the same computed from zeros, with the embedding of code 0 (the unconditional branch)."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive whole blocks of one utterance (the last may be shorter at the utterance's end)."""

    voice: Voice
    codes: Tensor
    """[codes] long; frames = codes · repeats."""
    noise: Tensor
    """[frames, M] float32: the flow's starting point."""
    first_block: int
    """Index of the window's first block in the utterance."""
    emit: int
    """Blocks that are finished after this window; the others serve as look-ahead."""
    past: Tensor | None
    """`FlowDecoder.past_shape`: keys and values of the block before the window, None at the start. Read only."""
    spare: Tensor | None = None
    """Memory of the same shape that the window may fill for the next one; None: it is allocated."""


@dataclass(frozen=True, slots=True)
class Decoded:
    mel: Tensor
    """[frames of the emitted blocks, M]."""
    past: Tensor | None
    """Keys and values of the last emitted block, for the next window; None at the utterance's end."""


@dataclass(slots=True)
class _View:
    """The attention views of a flat batch's blocks in one layer at one evaluation."""

    seen: Tensor | None
    """[R, 1, 1, keys] bool: true for real frames. None: all are real."""
    behind: Tensor | None = None
    """[R] rows of the previous blocks: first the batch's, then those of `past`. None: the layer ignores them."""
    ahead: Tensor | None = None
    """[R] rows of the next blocks. None: the layer ignores them."""
    past: Sequence[Tensor] = ()
    """Each [2 (key, value), branches, H, F, d]: blocks that are no longer in the batch."""
    keep: Sequence[tuple[int, Tensor]] = ()
    """(row of the first branch, [2, branches, H, F, d] to fill): blocks that the next windows attend to."""
    branches: int = 1


class _Layer(nn.Module):
    """One `DiTDecoderLayer`: its weights, projections of one input joined, and its adaLN modulation at all E times.

    A weightless norm followed by scale and shift is computed as a norm that has these as its weight and bias.
    """

    def __init__(self, layer: DiTDecoderLayer, embedded: Tensor) -> None:
        super().__init__()
        attention, feed_forward = layer.attn, layer.ff.ff
        self.heads = attention.heads
        self.back, self.ahead = layer.look_backward_block > 0, layer.look_ahead_block > 0
        self.norm_eps, self.ff_norm_eps = layer.attn_norm.norm.eps, layer.ff_norm.eps
        self.qkv = _joined([attention.to_q, attention.to_k, attention.to_v])
        self.out = attention.to_out[0]
        self.up, self.gelu, self.down = feed_forward[0], feed_forward[1].approximate, feed_forward[3]
        parts = layer.attn_norm.linear(embedded).chunk(6, dim=1)  # each [E, D]
        self.shift_attn, self.scale_attn, self.gate_attn = parts[0], 1 + parts[1], parts[2]
        self.shift_mlp, self.scale_mlp, self.gate_mlp = parts[3], 1 + parts[4], parts[5]

    def forward(self, hidden: Tensor, evaluation: int, rotation: Tensor, view: _View) -> Tensor:
        """[R, F, D] → [R, F, D]. rotation: [R, F, 1, d/2] complex64."""
        width = hidden.shape[-1:]
        norm = F.layer_norm(hidden, width, self.scale_attn[evaluation], self.shift_attn[evaluation], self.norm_eps)
        mixed = self.out(self._attend(self.qkv(norm), rotation, view))
        hidden = torch.addcmul(hidden, self.gate_attn[evaluation], mixed)
        norm = F.layer_norm(hidden, width, self.scale_mlp[evaluation], self.shift_mlp[evaluation], self.ff_norm_eps)
        return torch.addcmul(hidden, self.gate_mlp[evaluation], self.down(then_gelu(self.up, norm, self.gelu)))

    def _attend(self, qkv: Tensor, rotation: Tensor, view: _View) -> Tensor:
        """[R, F, 3 · H · d] → [R, F, H · d]: blocks attend to themselves and the neighbours in their view."""
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        # RoPE applies to the first head only, as in training. Its pairs are adjacent (x0, x1), (x2, x3), …: complex
        # numbers. The library first de-interleaves queries and keys alike, which leaves every dot product unchanged.
        torch.view_as_complex(qkv[:, :, :2, 0].unflatten(-1, (-1, 2))).mul_(rotation)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()  # [R, H, F, d]
        per_branch = query.shape[0] // view.branches
        for row, kept in view.keep:
            kept[0].copy_(key[row::per_branch])
            kept[1].copy_(value[row::per_branch])
        if view.behind is not None or view.ahead is not None:
            key, value = _with_neighbours(key, view, 0), _with_neighbours(value, view, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=view.seen)
        return mixed.transpose(1, 2).flatten(2)


def _with_neighbours(rows: Tensor, view: _View, which: int) -> Tensor:
    """[R, H, F, d] → [R, H, keys, d]: own block, previous, next, as far as the layer sees them."""
    parts = [rows]
    if view.behind is not None:
        pool = torch.cat([rows, *(past[which] for past in view.past)]) if view.past else rows
        parts.append(pool.index_select(0, view.behind))
    if view.ahead is not None:
        parts.append(rows.index_select(0, view.ahead))
    return torch.cat(parts, dim=2)


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Join linear layers that share an input into one layer, outputs concatenated."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joined = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device=weight.device)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return joined


class FlowDecoder:
    """Decodes codes to mel, for many windows at once. The source module is neither changed nor kept."""

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, settings: FlowSettings | None = None) -> None:
        config = dit.config
        self.settings = settings or FlowSettings()
        self.block, self.repeats, self.mel_dim = dit.block_size, dit.repeats, dit.mel_dim
        self.num_codes = dit.text_embed.codec_embed.num_embeddings
        self.branches = 1 if self.settings.guidance < 1e-5 else 2
        self.device = dit.proj_out.weight.device
        self.rotary, self.embed_code = dit.rotary_embed, dit.text_embed.codec_embed
        self._encode_speaker, self._project_out = dit.input_embed.spk_encoder, dit.proj_out
        self._steps = _time_grid(self.settings)
        self._heads, self._head_dim = config.num_attention_heads, config.head_dim
        with torch.inference_mode():
            projection = dit.input_embed.proj
            widths = [config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim]  # input columns
            parts = [part.contiguous() for part in projection.weight.split(widths, dim=1)]
            self._from_mel, self._from_encoder, self.from_code, self._from_speaker = parts
            self._bias = projection.bias
            times = torch.stack([time for step in self._steps for time in step.times]).to(self.device)
            embedded = F.silu(dit.time_embed(times))  # [E, D]
            self.layers = [_Layer(layer, embedded) for layer in dit.transformer_blocks]
            scale, self._shift_out = dit.norm_out.linear(embedded).chunk(2, dim=1)
            self._scale_out, self._norm_eps = 1 + scale, dit.norm_out.norm.eps
        for layer in self.layers:
            prepare(layer, self.device, Plan(rows=ROWS))
        with_past = [index for index, layer in enumerate(self.layers) if layer.back]
        self.slots = {index: slot for slot, index in enumerate(with_past)}
        """Layers that attend to the previous block → their index in a past."""

    @property
    def past_shape(self) -> tuple[int, ...]:
        """[E, layers with left context, 2 (key, value), branches, H, F, d]: a stream's state, float32."""
        evaluations = 4 * len(self._steps)
        return (evaluations, len(self.slots), 2, self.branches, self._heads, self.block, self._head_dim)

    @torch.inference_mode()
    def voice(self, embedding: Tensor, reference_mel: Tensor) -> Voice:
        """[1, enc_emb_dim] and [1, frames, M], from the speaker file → the voice. Costs one encoder pass."""
        mel = reference_mel.to(self.device, torch.float32)
        encoded = self._encode_speaker(torch.cat([mel, torch.zeros_like(mel)])) @ self._from_encoder.T  # [2, D]
        speaker = (embedding.to(self.device, torch.float32) @ self._from_speaker.T)[0]
        code_zero = self.embed_code.weight[0] @ self.from_code.T
        return Voice(encoded[0] + speaker + self._bias, encoded[1] + code_zero + self._bias)

    @torch.inference_mode()
    def integrate(self, windows: Sequence[Window]) -> list[Decoded]:
        """The mel frames of each window's emitted blocks, all windows in lockstep (Runge–Kutta, 3/8 rule)."""
        batch = _Batch(self, windows)
        y = batch.noise
        evaluation = 0
        for step in self._steps:
            h = step.size
            k1 = self._velocity(batch, evaluation, y)
            k2 = self._velocity(batch, evaluation + 1, y + h * k1 / 3)
            k3 = self._velocity(batch, evaluation + 2, y + h * (k2 - k1 / 3))
            k4 = self._velocity(batch, evaluation + 3, y + h * (k1 - k2 + k3))
            y = y + (k1 + 3 * (k2 + k3) + k4) * (h / 8)
            evaluation += 4
        return batch.split(y)

    def _velocity(self, batch: _Batch, evaluation: int, y: Tensor) -> Tensor:
        """The guided prediction [N, F, M] of the network at one evaluation."""
        x = F.linear(y, self._from_mel)
        hidden = (batch.base.view(self.branches, *x.shape) + x).flatten(0, 1)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, evaluation, batch.rotation, batch.view(index, evaluation))
        scale, shift = self._scale_out[evaluation], self._shift_out[evaluation]
        hidden = F.layer_norm(hidden, hidden.shape[-1:], scale, shift, self._norm_eps)
        if self.branches == 2:  # combine the guidance branches before the last projection, which is linear
            guided, null = hidden.chunk(2)
            hidden = guided + (guided - null) * self.settings.guidance
        return self._project_out(hidden)


@dataclass(frozen=True, slots=True)
class _Step:
    size: float
    times: tuple[Tensor, Tensor, Tensor, Tensor]
    """The four times at which the network is evaluated."""


def _time_grid(settings: FlowSettings) -> list[_Step]:
    """The library's time grid, in float32 as it computes it: uniform, then warped by the sway coefficient."""
    points = torch.linspace(0, 1, settings.num_steps)
    points = points + settings.sway * (torch.cos(torch.pi / 2 * points) - 1 + points)
    steps = []
    for start, end in pairwise(points):
        size = end - start
        steps.append(_Step(float(size), (start, start + size * (1 / 3), start + size * (2 / 3), end)))
    return steps


class _Batch:
    """Several windows as one flat batch of blocks: the conditioned blocks of all, then the null blocks of all."""

    def __init__(self, decoder: FlowDecoder, windows: Sequence[Window]) -> None:
        self._decoder = decoder
        self._windows = windows
        frames = [window.noise.shape[0] for window in windows]
        self._blocks = [-(-count // decoder.block) for count in frames]
        self._frames = frames
        device = decoder.device
        rows = decoder.branches * sum(self._blocks)
        self.noise = torch.cat([self._padded(window.noise.to(device)) for window in windows])
        self.base = self._base(device)
        positions = [
            torch.arange(blocks * decoder.block) + window.first_block * decoder.block
            for window, blocks in zip(windows, self._blocks, strict=True)
        ]
        table = torch.cat(positions).view(-1, decoder.block).repeat(decoder.branches, 1).to(device)
        cos, sin = decoder.rotary(self.noise, table)  # each [R, F, d], both halves equal
        half = cos.shape[-1] // 2
        self.rotation = torch.complex(cos[..., :half], sin[..., :half])[:, :, None]
        self._link(rows, device)
        self._remember(device)

    def _padded(self, frames: Tensor) -> Tensor:
        """[frames, width] → [blocks, F, width], zero-padded at the end."""
        block = self._decoder.block
        return F.pad(frames, (0, 0, 0, -frames.shape[0] % block)).view(-1, block, frames.shape[1])

    def _base(self, device: torch.device) -> Tensor:
        """[R, F, D]: the share of the input projection that is the same at every evaluation."""
        decoder = self._decoder
        conditioned, null = [], []
        for window in self._windows:
            codes = decoder.embed_code(window.codes.to(device))
            spoken = F.linear(codes, decoder.from_code) + window.voice.conditioned
            conditioned.append(self._padded(spoken.repeat_interleave(decoder.repeats, dim=0)))
            null.append(window.voice.null.expand_as(conditioned[-1]))
        return torch.cat(conditioned + null if decoder.branches == 2 else conditioned)

    def _link(self, rows: int, device: torch.device) -> None:
        """Compute each block's neighbours, and which frames are real."""
        block, branches = self._decoder.block, self._decoder.branches
        real = torch.zeros(rows + 1, block, dtype=torch.bool)  # the last row stands for a missing neighbour
        behind, ahead = [], []
        row = 0
        with_past = [w for w, window in enumerate(self._windows) if window.past is not None]
        for branch in range(branches):
            for w, (blocks, frames) in enumerate(zip(self._blocks, self._frames, strict=True)):
                real[row : row + blocks].view(-1)[:frames] = True
                before = rows + with_past.index(w) * branches + branch if w in with_past else -1
                behind += [before, *range(row, row + blocks - 1)]
                ahead += [*range(row + 1, row + blocks), -1]
                row += blocks
        behind_rows, ahead_rows = torch.tensor(behind), torch.tensor(ahead)
        seen = {
            (False, False): [real[:-1]],
            (True, False): [real[:-1], (behind_rows >= 0)[:, None].expand(-1, block)],
            (False, True): [real[:-1], real[ahead_rows]],
            (True, True): [real[:-1], (behind_rows >= 0)[:, None].expand(-1, block), real[ahead_rows]],
        }
        self._seen: dict[tuple[bool, bool], Tensor | None] = {}
        for kind, parts in seen.items():
            mask = torch.cat(parts, dim=1)
            self._seen[kind] = None if bool(mask.all()) else mask[:, None, None].to(device)
        self._behind, self._ahead = behind_rows.clamp(min=0).to(device), ahead_rows.clamp(min=0).to(device)

    def _remember(self, device: torch.device) -> None:
        """Allocate the keys and values that the next windows need: the last emitted block of unfinished windows."""
        decoder = self._decoder
        self._pasts = [window.past for window in self._windows if window.past is not None]
        self._kept: dict[int, Tensor] = {}
        self._keep_rows: dict[int, int] = {}
        row = 0
        for w, (window, blocks) in enumerate(zip(self._windows, self._blocks, strict=True)):
            if window.emit < blocks:
                spare = window.spare
                self._kept[w] = torch.empty(decoder.past_shape, device=device) if spare is None else spare
                self._keep_rows[w] = row + window.emit - 1
            row += blocks

    def view(self, index: int, evaluation: int) -> _View:
        layer = self._decoder.layers[index]
        view = _View(self._seen[layer.back, layer.ahead], branches=self._decoder.branches)
        if layer.ahead:
            view.ahead = self._ahead
        if layer.back:
            slot = self._decoder.slots[index]
            view.behind = self._behind
            view.past = [past[evaluation, slot] for past in self._pasts]
            view.keep = [(self._keep_rows[w], kept[evaluation, slot]) for w, kept in self._kept.items()]
        return view

    def split(self, mel: Tensor) -> list[Decoded]:
        """[N, F, M] of all windows → each window's emitted frames, and the past for its next window."""
        decoded, row = [], 0
        for w, (window, blocks, frames) in enumerate(zip(self._windows, self._blocks, self._frames, strict=True)):
            emitted = mel[row : row + window.emit].flatten(0, 1)[:frames]
            decoded.append(Decoded(emitted, self._kept.get(w)))
            row += blocks
        return decoded
