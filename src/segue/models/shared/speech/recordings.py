"""The recordings of a conversation: a stage that encodes them into codes, and what a decoder gets of them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes

_KIND = "audio"


def recording_item(samples: np.ndarray) -> Payload:
    """[samples] float32, contiguous → the recording as the input stage sends it; equal hashes mean equal samples."""
    return {"hash": hashlib.blake2b(samples.data, digest_size=32).digest(), "samples": torch.from_numpy(samples)}


class RecordingEncoder(ABC):
    """`ModuleModel` over a codec's encoder.

    Recordings are encoded one by one: nothing of one reaches another.

    Options: `cache_bytes`, for results that are kept.
    """

    def __init__(self, ctx: LoadContext, rate: int, samples_per_cost: int) -> None:
        """`rate`: samples per second. `samples_per_cost`: those that cost as much as a mel frame of other encoders."""
        self._rate = rate
        self._samples_per_cost = samples_per_cost
        self.cache = EncoderCache(cache_bytes(ctx))

    @abstractmethod
    def encode(self, recordings: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[samples] float32 each → its codes, long, on the CPU, one row per frame or patch."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encode a second of silence, bypassing the cache."""
        self.encode([torch.zeros(self._rate)])

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's chunk → one work item per recording, in order."""
        works = [
            Work(state, (index, item), cost=1 + len(item["samples"]) // self._samples_per_cost, ordered=False)
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
        codes = self.cache.through({(_KIND, item["hash"]): item["samples"] for item in items}, self.encode)
        return [Result({"media": [] if work.item is None else [_coded(work.item, codes)]}) for work in works]

    def end(self, state: str) -> None:
        """Nothing to free: no state is kept per request."""


@dataclass(slots=True)
class PromptParts:
    """The parts of one request's prompt that have arrived at the decoder, from the input stage and from `encoder`."""

    ids: torch.Tensor | None = None
    """[T] text ids on the CPU, with placeholders for the recordings."""
    recordings: dict[int, torch.Tensor] = field(default_factory=dict)
    """By place in the prompt: the codes of a recording, one row per frame or patch."""
    prompted: bool = False
    """The prompt was made."""

    def take(self, upstream: str, payload: Payload) -> None:
        if upstream == "encoder":  # what it sent before a restart comes again
            self.recordings.update((item["index"], item["codes"]) for item in payload["media"])
        else:
            self.ids = payload["token_ids"].cpu()

    def in_order(self) -> list[torch.Tensor]:
        """The recordings in prompt order."""
        return [self.recordings[index] for index in sorted(self.recordings)]


def _coded(numbered: tuple[int, Payload], codes: Mapping[tuple[str, bytes], torch.Tensor]) -> Payload:
    index, item = numbered
    return {"index": index, "codes": codes[_KIND, item["hash"]]}
