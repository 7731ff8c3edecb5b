"""Text encoders (and other encoders of conditions) as stages of their own: prompts of many requests share a call, and
each is encoded once. Includes CLIP, with one or several encoders over the same prompt, and T5, which pads prompts and
attends to the padding."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.shared.diffusion.loading import load_encoder
from segue.models.shared.encoder_cache import EncoderCache, add_content, cache_bytes


class TextEncoder(ABC):
    """`ModuleModel`: `{"texts": [item, …]}` in, `{"texts": [{name: tensor}, …]}` out, final.

    An item is the input stage's result for one prompt (plain values and tensors); equal items are encoded once and
    cached (option `cache_bytes`).
    """

    key: ClassVar[str] = "texts"
    """Payload key of the items, in and out."""
    names: ClassVar[tuple[str, ...]] = ("embeds",)
    """The tensors that `encode` returns for an item."""

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.cache = EncoderCache(cache_bytes(ctx))

    @abstractmethod
    def encode(self, items: Sequence[Any]) -> Sequence[dict[str, torch.Tensor]]:
        """Run one call of the network; returns each item's tensors, without padding. An item's result must not depend
        on the other items."""

    def bucket(self, items: Sequence[Any]) -> Hashable:
        """Requests share a call only if their buckets are equal."""
        return None

    def warm_up(self) -> None:
        """Does nothing by default: only families know the format of an item."""

    def padded(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask [texts, longest] long: each text starts at its row's begin, and the mask is 1 over it."""
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        return ids, mask

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Take the input stage's only chunk."""
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
                # clone: a view would keep the whole call's memory
                found[key] = {name: tensors[name].clone() for name in self.names}
                for name in self.names:
                    self.cache.put((name, key), found[key][name])
        return [Result({self.key: [found[key] for key, _ in pairs]}) for pairs in keyed]

    def end(self, state: str) -> None:
        """Nothing to free: no state is kept per request."""

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


class T5Encoder(TextEncoder):
    """`ModuleModel`. An item is a list of token ids, padded to the requested length; its `embeds`: [tokens, hidden]. As
    in the pipelines there is no mask: only prompts of equal length share a call."""

    component: ClassVar[str]

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.network = load_encoder(ctx, self.component)

    def bucket(self, items: Sequence[Any]) -> Hashable:
        """All prompts of a request have one length."""
        return len(items[0])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        made = self.network(input_ids=torch.tensor(list(items), device=self.device))
        return [{"embeds": embeds} for embeds in made.last_hidden_state]


class ClipEncoder(TextEncoder):
    """`ModuleModel`. An item has one list of token ids per encoder, each padded to that encoder's length. Results:
    `embeds` [tokens, hidden], the hidden states before the last layer, and `pooled` [features], those of the end token
    (projected if the encoder has a projection). Several encoders' results are concatenated by features."""

    names: ClassVar[tuple[str, ...]] = ("embeds", "pooled")
    components: ClassVar[tuple[str, ...]] = ("text_encoder",)

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.networks = torch.nn.ModuleList([load_encoder(ctx, name) for name in self.components])

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        embeds, pooled = [], []
        for place, network in enumerate(self.networks):
            ids = torch.tensor([item[place] for item in items], device=self.device)
            made = network(input_ids=ids, output_hidden_states="embeds" in self.names)
            if "embeds" in self.names:
                embeds.append(made.hidden_states[-2])
            pooled.append(made.text_embeds if "text_embeds" in made else made.pooler_output)
        both = {"pooled": torch.cat(pooled, dim=-1)}
        if embeds:
            both["embeds"] = torch.cat(embeds, dim=-1)
        return [{name: tensor[row] for name, tensor in both.items()} for row in range(len(items))]


class PooledClipEncoder(ClipEncoder):
    """`ModuleModel` that returns `pooled` alone."""

    names = ("pooled",)
