"""Flow matching from codes to mel frames with Token2Wav's DiT, in blocks and in windows of an utterance.

The network attends block-wise: every layer sees its own block of `block_size` frames, some also the next block, some
also the previous one. So the frames of any mix of requests, windows and guidance branches can be one flat batch of
blocks, without padding, if each block knows the rows of its two neighbours. The layers and weights are those of
`Qwen2_5OmniToken2WavDiTModel`; its attention arrives at `block_attention` through transformers' `AttentionInterface`.

What does not change over the solver's evaluations is computed once: the speaker encoder per voice, code embeddings and
their share of the input projection per window, rotary tables per window, time embeddings and all modulations per time.

Shape legend: N blocks of one guidance branch · R rows = blocks of all branches · F frames per block · H heads ·
d head_dim · D hidden · M mel_dim · E evaluations of the network · W windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()

from transformers import AttentionInterface  # noqa: E402

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import DiTDecoderLayer, Qwen2_5OmniToken2WavDiTModel

ATTENTION = "segue_blocks"


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """How the flow is integrated; the defaults are those of the family's own `generate`."""

    num_steps: int = 10
    """Points of the time grid: one fewer steps of four evaluations each."""
    guidance: float = 0.5
    sway: float = -1.0


@dataclass(frozen=True, slots=True)
class Voice:
    """What a speaker adds to the input projection, the same for every frame and evaluation."""

    conditioned: Tensor
    """[D]: reference mel through the speaker encoder, speaker embedding, bias."""
    null: Tensor
    """[D]: the same of zeros, with the embedding of code 0."""


@dataclass(frozen=True, slots=True)
class Window:
    """A run of whole blocks of one utterance (the last may be shorter where the utterance ends)."""

    voice: Voice
    codes: Tensor
    """[codes] long; frames = codes · repeats."""
    noise: Tensor
    """[frames, M] float32: where the flow starts."""
    first_block: int
    """Index of the window's first block in the utterance."""
    emit: int
    """Blocks that are finished after this window; the rest are there to be looked ahead at."""
    past: Tensor | None
    """`FlowDecoder.past_shape`: keys and values of the block before the window, None at the beginning. Only read."""
    spare: Tensor | None = None
    """Memory of the same shape that the window may fill for the next one; None: it is allocated."""


@dataclass(frozen=True, slots=True)
class Decoded:
    mel: Tensor
    """[frames of the emitted blocks, M]."""
    past: Tensor | None
    """What the next window looks back on; None where the utterance ends here."""


@dataclass(slots=True)
class BlockView:
    """What the blocks of a flat batch see in one layer; travels as the layer's `attention_mask`."""

    seen: Tensor | None
    """[R, 1, 1, keys] bool: real frames. None: all are."""
    behind: Tensor | None = None
    """[R] rows of the previous blocks, counted over the batch, then over `past`. None: it does not look back."""
    ahead: Tensor | None = None
    """[R] rows of the next blocks. None: it does not look ahead."""
    past: Sequence[Tensor] = ()
    """Each [2 (key, value), branches, H, F, d]: blocks that are no longer in the batch."""
    keep: Sequence[tuple[int, Tensor]] = ()
    """(row of the first branch, [2, branches, H, F, d] to fill): blocks that the next windows will look back on."""
    branches: int = 1


def block_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: BlockView, **_: Any
) -> tuple[Tensor, None]:
    """Attention of blocks [R, H, F, d] to themselves and the neighbours in their `BlockView` → [R, F, H, d].

    The function that transformers calls for a DiT whose `_attn_implementation` is `segue_blocks`.
    """
    view = attention_mask
    pair = (key, value)
    if view.behind is not None or view.ahead is not None:
        pair = (_neighbours(key, view, 0), _neighbours(value, view, 1))
    per_branch = query.shape[0] // view.branches
    for row, kept in view.keep:
        kept[0].copy_(key[row::per_branch])
        kept[1].copy_(value[row::per_branch])
    mixed = F.scaled_dot_product_attention(query, *pair, attn_mask=view.seen)
    return mixed.transpose(1, 2), None


def _neighbours(rows: Tensor, view: BlockView, which: int) -> Tensor:
    """[R, H, F, d] → [R, H, keys, d]: own block, previous, next, as the layer sees them."""
    parts = [rows]
    if view.behind is not None:
        pool = torch.cat([rows, *(past[which] for past in view.past)]) if view.past else rows
        parts.append(pool.index_select(0, view.behind))
    if view.ahead is not None:
        parts.append(rows.index_select(0, view.ahead))
    return torch.cat(parts, dim=2)


AttentionInterface.register(ATTENTION, block_attention)


@dataclass(frozen=True, slots=True)
class _Modulation:
    """AdaLN of one layer at all evaluations: each [E, D]; scales have 1 added."""

    scale_attn: Tensor
    shift_attn: Tensor
    gate_attn: Tensor
    scale_mlp: Tensor
    shift_mlp: Tensor
    gate_mlp: Tensor


class FlowDecoder:
    """Codes to mel, for many windows at once. Takes the module over: its own `forward` no longer works."""

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, settings: FlowSettings | None = None) -> None:
        self.settings = settings or FlowSettings()
        dit.config._attn_implementation = ATTENTION
        self._dit = dit
        self._device = dit.proj_out.weight.device
        self._branches = 1 if self.settings.guidance < 1e-5 else 2
        self.block = dit.block_size
        self.repeats = dit.repeats
        self.mel_dim = dit.mel_dim
        self.num_codes = dit.text_embed.codec_embed.num_embeddings
        looking = [index for index, layer in enumerate(dit.transformer_blocks) if layer.look_backward_block > 0]
        self._slots = {index: slot for slot, index in enumerate(looking)}
        """Layers that look back → their place in a past."""
        with torch.inference_mode():
            self._split_projection()
            self._steps = _time_grid(self.settings)
            self._modulate()

    @property
    def past_shape(self) -> tuple[int, ...]:
        """[E, look-back layers, 2 (key, value), branches, H, F, d]: what a stream keeps between windows, float32."""
        config = self._dit.config
        evaluations, heads = 4 * len(self._steps), config.num_attention_heads
        return (evaluations, len(self._slots), 2, self._branches, heads, self.block, config.head_dim)

    def _split_projection(self) -> None:
        """The input projection by what its columns multiply: mel frame, speaker encoder, code, speaker embedding."""
        dit, config = self._dit, self._dit.config
        widths = [config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim]
        parts = dit.input_embed.proj.weight.split(widths, dim=1)
        self._from_mel, self._from_encoder, self._from_code, self._from_speaker = (part.contiguous() for part in parts)

    def _modulate(self) -> None:
        """Time embeddings and what every layer makes of them, at the times of all evaluations."""
        times = torch.stack([time for step in self._steps for time in step.times]).to(self._device)
        embedded = F.silu(self._dit.time_embed(times))  # [E, D]
        self._modulations = []
        for layer in self._dit.transformer_blocks:
            shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = layer.attn_norm.linear(embedded).chunk(6, dim=1)
            self._modulations.append(_Modulation(1 + scale, shift, gate, 1 + scale_mlp, shift_mlp, gate_mlp))
        scale, shift = self._dit.norm_out.linear(embedded).chunk(2, dim=1)
        self._scale_out, self._shift_out = 1 + scale, shift

    @torch.inference_mode()
    def voice(self, embedding: Tensor, reference_mel: Tensor) -> Voice:
        """[1, enc_emb_dim] and [1, frames, M], as the speaker file has them → the voice. Costs one encoder pass."""
        encoder, bias = self._dit.input_embed.spk_encoder, self._dit.input_embed.proj.bias
        mel = reference_mel.to(self._device, torch.float32)
        encoded = encoder(torch.cat([mel, torch.zeros_like(mel)])) @ self._from_encoder.T  # [2, D]
        speaker = (embedding.to(self._device, torch.float32) @ self._from_speaker.T)[0]
        code_zero = self._dit.text_embed.codec_embed.weight[0] @ self._from_code.T
        return Voice(encoded[0] + speaker + bias, encoded[1] + code_zero + bias)

    @torch.inference_mode()
    def integrate(self, windows: Sequence[Window]) -> list[Decoded]:
        """The mel frames of the emitted blocks of each window, all windows in lockstep (Runge–Kutta, 3/8 rule)."""
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
        hidden = (batch.base.view(self._branches, *x.shape) + x).flatten(0, 1)
        for index, layer in enumerate(self._dit.transformer_blocks):
            hidden = self._layer(index, layer, evaluation, hidden, batch)
        hidden = F.layer_norm(
            hidden, hidden.shape[-1:], self._scale_out[evaluation], self._shift_out[evaluation], eps=1e-6
        )
        if self._branches == 2:  # guidance before the last projection, which is linear
            guided, null = hidden.chunk(2)
            hidden = guided + (guided - null) * self.settings.guidance
        return self._dit.proj_out(hidden)

    def _layer(self, index: int, layer: DiTDecoderLayer, evaluation: int, hidden: Tensor, batch: _Batch) -> Tensor:
        """`DiTDecoderLayer.forward` with the modulation looked up. A norm without weights, scaled and shifted, is a
        norm with these as its weights."""
        modulation = self._modulations[index]
        width = hidden.shape[-1:]
        norm = F.layer_norm(
            hidden,
            width,
            modulation.scale_attn[evaluation],
            modulation.shift_attn[evaluation],
            layer.attn_norm.norm.eps,
        )
        view = batch.view(layer, index, evaluation)
        mixed = layer.attn(norm, position_embeddings=batch.rotary, attention_mask=view)
        hidden = torch.addcmul(hidden, modulation.gate_attn[evaluation], mixed)
        norm = F.layer_norm(
            hidden, width, modulation.scale_mlp[evaluation], modulation.shift_mlp[evaluation], layer.ff_norm.eps
        )
        return torch.addcmul(hidden, modulation.gate_mlp[evaluation], layer.ff(norm))


@dataclass(frozen=True, slots=True)
class _Step:
    size: float
    times: tuple[Tensor, Tensor, Tensor, Tensor]
    """The four times at which the network is evaluated."""


def _time_grid(settings: FlowSettings) -> list[_Step]:
    """The library's grid, in float32 as it computes it: even, then bent by the sway coefficient."""
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
        device = decoder._device
        rows = decoder._branches * sum(self._blocks)
        self.noise = torch.cat([self._padded(window.noise.to(device)) for window in windows])
        self.base = self._base(device)
        positions = [
            torch.arange(blocks * decoder.block) + window.first_block * decoder.block
            for window, blocks in zip(windows, self._blocks, strict=True)
        ]
        table = torch.cat(positions).view(-1, decoder.block).repeat(decoder._branches, 1).to(device)
        self.rotary = decoder._dit.rotary_embed(self.noise, table)
        self._link(rows, device)
        self._remember(device)

    def _padded(self, frames: Tensor) -> Tensor:
        """[frames, width] → [blocks, F, width], zeros after the end."""
        block = self._decoder.block
        return F.pad(frames, (0, 0, 0, -frames.shape[0] % block)).view(-1, block, frames.shape[1])

    def _base(self, device: torch.device) -> Tensor:
        """[R, F, D]: the share of the input projection that is the same at every evaluation."""
        decoder = self._decoder
        conditioned, null = [], []
        for window in self._windows:
            codes = decoder._dit.text_embed.codec_embed(window.codes.to(device))
            spoken = F.linear(codes, decoder._from_code) + window.voice.conditioned
            conditioned.append(self._padded(spoken.repeat_interleave(decoder.repeats, dim=0)))
            null.append(window.voice.null.expand_as(conditioned[-1]))
        return torch.cat(conditioned + null if decoder._branches == 2 else conditioned)

    def _link(self, rows: int, device: torch.device) -> None:
        """Who is beside whom, and which frames are real."""
        block, branches = self._decoder.block, self._decoder._branches
        real = torch.zeros(rows + 1, block, dtype=torch.bool)  # the last row: nobody
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
        """Room for what the next windows look back on: the last emitted block of every window that goes on."""
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

    def view(self, layer: DiTDecoderLayer, index: int, evaluation: int) -> BlockView:
        back, ahead = layer.look_backward_block > 0, layer.look_ahead_block > 0
        view = BlockView(self._seen[back, ahead], branches=self._decoder._branches)
        if ahead:
            view.ahead = self._ahead
        if back:
            slot = self._decoder._slots[index]
            view.behind = self._behind
            view.past = [past[evaluation, slot] for past in self._pasts]
            view.keep = [(self._keep_rows[w], kept[evaluation, slot]) for w, kept in self._kept.items()]
        return view

    def split(self, mel: Tensor) -> list[Decoded]:
        """[N, F, M] of all windows → what each emits, and what its next window looks back on."""
        decoded, row = [], 0
        for w, (window, blocks, frames) in enumerate(zip(self._windows, self._blocks, self._frames, strict=True)):
            emitted = mel[row : row + window.emit].flatten(0, 1)[:frames]
            decoded.append(Decoded(emitted, self._kept.get(w)))
            row += blocks
        return decoded
