"""An encoder of conditions as a stage of its own, mostly of text: prompts of many requests in one call, each encoded
once."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.encoder_cache import EncoderCache, add_content, cache_bytes


class TextEncoder(ABC):
    """`ModuleAdapter`: `{"texts": [item, …]}` in, `{"texts": [{name: tensor}, …]}` out, final.

    An item is what the family's input stage made of one prompt (plain values and tensors); equal ones are encoded once
    and kept (option `cache_bytes`).
    """

    key: ClassVar[str] = "texts"
    """Under which the items come and leave."""
    names: ClassVar[tuple[str, ...]] = ("embeds",)
    """The tensors that `encode` gives for an item."""

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.cache = EncoderCache(cache_bytes(ctx))

    @abstractmethod
    def encode(self, items: Sequence[Any]) -> Sequence[dict[str, torch.Tensor]]:
        """One call of the network: for each item its tensors, without padding. The result of an item must not depend on
        the others."""

    def bucket(self, items: Sequence[Any]) -> Hashable:
        """Only the items of requests of equal bucket share a call."""
        return None

    def warm_up(self) -> None:
        """Families that know what an item looks like may do more."""

    def padded(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask [texts, longest] long: each text begins its row, and the mask is 1 where it is."""
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        return ids, mask

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's one chunk."""
        items = payload[self.key]
        return [Work(state, items, bucket=self.bucket(items), cost=len(items), last=True, ordered=False)]

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        keyed = [[(_hash(item), item) for item in work.item] for work in works]
        found: dict[bytes, dict[str, torch.Tensor]] = {}
        missing: dict[bytes, Any] = {}
        for key, item in (pair for pairs in keyed for pair in pairs):
            if (known := self._known(key)) is not None:
                found[key] = known
            else:
                missing[key] = item
        if missing:
            for key, tensors in zip(missing, self.encode(list(missing.values())), strict=True):
                # memory of its own: a view would keep the whole call's
                found[key] = {name: tensors[name].clone() for name in self.names}
                for name in self.names:
                    self.cache.put((name, key), found[key][name])
        return [Result({self.key: [found[key] for key, _ in pairs]}) for pairs in keyed]

    def end(self, state: str) -> None:
        """Nothing is kept per request."""

    def _known(self, key: bytes) -> dict[str, torch.Tensor] | None:
        known = {}
        for name in self.names:
            tensor = self.cache.get((name, key))
            if tensor is None:
                return None
            known[name] = tensor
        return known


def _hash(item: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    add_content(digest, item)
    return digest.digest()
