"""Run the encoder as a stage of its own: spectrogram windows → encoder states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.kernels.prepare import Plan, prepare
from segue.models.shared.decoder.interface import cannot_be_served
from segue.models.shared.decoder.tolerance import difference, tolerance
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes
from segue.models.speech.speech_seq2seq.loading import encoder_of

ROWS = 256
"""Typical number of rows per call on a CPU; linear layers choose their weight layout for it."""
KIND = "audio"


class Encoder:
    """`ModuleModel`: windows of several requests share a call; equal windows, and those in the cache, are encoded once.

    Option: `cache_bytes`, for encoder states of earlier windows.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` if a window's encoding differs between a batch and a single call."""
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.cache = EncoderCache(cache_bytes(ctx))
        self._encoder, shape = encoder_of(ctx)
        prepare(self._encoder, ctx.device, Plan(rows=ROWS))
        self._try_out(shape)

    def warm_up(self) -> None:
        """Nothing to do: windows were encoded at load."""

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Take the input stage's window."""
        return [Work(state, payload["window"], bucket=KIND, last=final, ordered=False)]

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        windows = {(KIND, work.item["hash"]): work.item["frames"] for work in works}
        rows = self.cache.through(windows, self._encode)
        return [Result({"hash": work.item["hash"], "rows": rows[KIND, work.item["hash"]]}) for work in works]

    def end(self, state: str) -> None:
        """Nothing to free: no state is kept per request."""

    def _encode(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[bins, frames] each → [n, H] each."""
        frames = torch.stack(list(windows)).to(self.device, self.dtype)
        made: Any = self._encoder(frames)
        return [own.clone() for own in made.last_hidden_state]

    @torch.inference_mode()
    def _try_out(self, shape: tuple[int, int]) -> None:
        """Encode two windows of noise, together and alone, and compare."""
        generator = torch.Generator().manual_seed(0)
        windows = [torch.randn(shape, generator=generator) for _ in range(2)]
        together = torch.stack(self._encode(windows))
        alone = torch.stack([self._encode([window])[0] for window in windows])
        off = difference(alone, together)
        if not off <= tolerance(self.dtype):
            raise cannot_be_served(
                type(self._encoder).__name__,
                f"it encodes a window differently in a batch than alone (by {off:.1e})",
            )
