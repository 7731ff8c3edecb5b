"""The encoder of a VAE as a stage of its own: the pictures that requests bring → latents, each encoded once."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.diffusion.loading import load_component
from segue.models.encoder_cache import EncoderCache, add_content, cache_bytes


class PictureEncoder(ABC):
    """`ModuleAdapter`: `{"pictures": [[3, H, W] in [-1, 1], …]}` in, `{"pictures": [{name: tensor}, …]}` out, final.

    Pictures of one size share a call; equal ones are encoded once and kept (option `cache_bytes`).
    """

    component: ClassVar[str] = "vae"
    names: ClassVar[tuple[str, ...]]
    """The tensors that `encode` gives for a picture."""

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.vae = load_component(ctx, self.component)
        self.dtype: torch.dtype = self.vae.dtype
        self.cache = EncoderCache(cache_bytes(ctx))

    @abstractmethod
    def encode(self, pixels: Sequence[torch.Tensor]) -> Sequence[dict[str, torch.Tensor]]:
        """One call of the network over pictures of one size."""

    def warm_up(self) -> None:  # noqa: B027
        """Families that know a small picture may do more."""

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's one chunk."""
        pictures = payload["pictures"]
        sizes = tuple(tuple(picture.shape) for picture in pictures)
        return [Work(state, pictures, bucket=sizes, cost=len(pictures), last=True, ordered=False)]

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        results: list[list[dict[str, torch.Tensor]]] = [[] for _ in works]
        for place in range(len(works[0].item)):  # all have pictures of the same sizes, in the same order
            for made, one in zip(results, self._encoded([work.item[place] for work in works]), strict=True):
                made.append(one)
        return [Result({"pictures": made}) for made in results]

    def end(self, state: str) -> None:  # noqa: B027
        """Nothing is kept per request."""

    def _encoded(self, pixels: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        keys = [_hash(picture) for picture in pixels]
        found = {key: known for key in keys if (known := self._known(key)) is not None}
        missing = {key: picture for key, picture in zip(keys, pixels, strict=True) if key not in found}
        if missing:
            for key, tensors in zip(missing, self.encode(list(missing.values())), strict=True):
                # memory of its own: a view would keep the whole call's
                found[key] = {name: tensors[name].clone() for name in self.names}
                for name in self.names:
                    self.cache.put((name, key), found[key][name])
        return [found[key] for key in keys]

    def _known(self, key: bytes) -> dict[str, torch.Tensor] | None:
        known = {}
        for name in self.names:
            tensor = self.cache.get((name, key))
            if tensor is None:
                return None
            known[name] = tensor
        return known


def _hash(picture: torch.Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    add_content(digest, picture)
    return digest.digest()
