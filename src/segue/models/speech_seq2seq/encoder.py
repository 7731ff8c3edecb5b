"""The encoder as a stage of its own: windows of a spectrogram → rows that the decoder attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.kernels.linear import pack_linears
from segue.models.encoder_cache import EncoderCache, cache_bytes
from segue.models.interface import cannot_be_served
from segue.models.speech_seq2seq.loading import encoder_of
from segue.models.tolerance import difference, tolerance

ROWS = 256
"""Rows per call on a CPU, roughly: what its weights are laid out for."""
KIND = "audio"


class Encoder:
    """`ModuleAdapter`: windows of several requests in one call; equal ones, and those heard before, once.

    Option: `cache_bytes`, for rows of windows that were heard before.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` where a window gives other rows beside others than alone."""
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.cache = EncoderCache(cache_bytes(ctx))
        self._encoder, shape = encoder_of(ctx)
        pack_linears(self._encoder, ROWS)
        self._try_out(shape)

    def warm_up(self) -> None:
        """Windows were encoded at load."""

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's window."""
        return [Work(state, payload["window"], bucket=KIND, last=final, ordered=False)]

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        windows = {(KIND, work.item["hash"]): work.item["frames"] for work in works}
        rows = self.cache.through(windows, self._encode)
        return [Result({"hash": work.item["hash"], "rows": rows[KIND, work.item["hash"]]}) for work in works]

    def end(self, state: str) -> None:
        """Nothing is kept per request."""

    def _encode(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[bins, frames] each → [n, H] each."""
        frames = torch.stack(list(windows)).to(self.device, self.dtype)
        made: Any = self._encoder(frames)
        return [own.clone() for own in made.last_hidden_state]

    @torch.inference_mode()
    def _try_out(self, shape: tuple[int, int]) -> None:
        """Two windows of noise, together and alone."""
        generator = torch.Generator().manual_seed(0)
        windows = [torch.randn(shape, generator=generator) for _ in range(2)]
        together = torch.stack(self._encode(windows))
        alone = torch.stack([self._encode([window])[0] for window in windows])
        off = difference(alone, together)
        if not off <= tolerance(self.dtype):
            raise cannot_be_served(
                type(self._encoder).__name__,
                f"it encodes a window otherwise beside others than alone (by {off:.1e})",
            )
