"""Encode the recordings of a conversation into codes, as a stage of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes
from segue.models.speech.mimo_audio.config import read_codec, read_config
from segue.models.speech.mimo_audio.loading import load_encoder

_KIND = "audio"


class RecordingEncoder:
    """`ModuleModel` over the encoder of the audio tokenizer; always float32.

    Recordings are encoded one by one: nothing of one reaches another. A last patch that is not full repeats its last
    frame. Options: `cache_bytes`, for results that are kept.
    """

    def __init__(self, ctx: LoadContext) -> None:
        config = read_config(ctx.model_dir)
        codec = read_codec(ctx.model_dir, config)
        self.net = load_encoder(ctx, codec, config)
        self._device = ctx.device
        self._group, self._rate, self._hop = config.group_size, codec.sampling_rate, codec.hop_length
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
            Work(state, (index, item), cost=1 + len(item["samples"]) // self._hop, ordered=False)
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
        """[samples] float32 each → [patches, G · K] long on the CPU each."""
        return [self._patches(self.net(samples.to(self._device)).cpu()) for samples in recordings]

    def _patches(self, codes_nK: torch.Tensor) -> torch.Tensor:
        missing = -len(codes_nK) % self._group
        whole = torch.cat([codes_nK, codes_nK[-1:].expand(missing, -1)])
        return whole.reshape(len(whole) // self._group, -1).contiguous()


def _coded(numbered: tuple[int, Payload], codes: Mapping[tuple[str, bytes], torch.Tensor]) -> Payload:
    index, item = numbered
    return {"index": index, "codes": codes[_KIND, item["hash"]]}
