"""Encode the recordings of a conversation with the library's Mimi, as a stage of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes
from segue.models.speech.csm.loading import load_config, load_encoder

_KIND = "audio"
_COST = 240
"""Samples that cost as much as one mel frame of other encoders."""


class Encoder:
    """`ModuleModel` over the codec's encoder; always float32.

    Recordings are encoded whole and one by one, as in the library: it has no mask for padding.

    Options: `cache_bytes`, for results that are kept.
    """

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        self._codec = load_encoder(ctx, config)
        self._device = ctx.device
        self._rate: int = config.codec_config.sampling_rate
        self.cache = EncoderCache(cache_bytes(ctx))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encode a second of silence, bypassing the cache."""
        self._encode([torch.zeros(self._rate)])

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's chunk → one work item per recording, in order."""
        works = [
            Work(state, (index, item), cost=1 + len(item["samples"]) // _COST, ordered=False)
            for index, item in enumerate(payload["media"])
        ]
        if final:
            if not works:
                works = [Work(state, None, bucket="none")]
            works[-1].last = True
        return works

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Encode recordings; equal ones, and those in the cache, only once."""
        items = [work.item[1] for work in works if work.item is not None]
        codes = self.cache.through({(_KIND, item["hash"]): item["samples"] for item in items}, self._encode)
        return [Result({"media": [] if work.item is None else [_coded(work.item, codes)]}) for work in works]

    def end(self, state: str) -> None:
        """Nothing to free: no state is kept per request."""

    def _encode(self, recordings: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[samples] float32 each → [frames, K] long on the CPU each."""
        return [
            self._codec.encode(samples.to(self._device)[None, None], return_dict=True).audio_codes[0].T.cpu()
            for samples in recordings
        ]


def _coded(numbered: tuple[int, Payload], codes: Mapping[tuple[str, bytes], torch.Tensor]) -> Payload:
    index, item = numbered
    return {"index": index, "codes": codes[_KIND, item["hash"]]}
