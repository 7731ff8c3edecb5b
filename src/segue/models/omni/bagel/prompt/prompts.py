"""Passages as the engine's prompt: rows of images in their places.

T prompt tokens, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch

from segue.engines.autoregressive.contract import FlatBatch, Prompt
from segue.models.omni.bagel.decoder import Experts
from segue.models.omni.bagel.prompt.passages import Block, Passages

_LATENT_SPANS = "latents"
"""Entry of `Prompt.extras`: the ranges of tokens that are latents."""


@torch.inference_mode()
def prompt_of(
    passages: Passages,
    embed: Callable[[torch.Tensor], torch.Tensor],
    image: Callable[[Block], tuple[torch.Tensor, bytes]],
    device: torch.device,
) -> Prompt:
    """`embed`: ids [n] → [n, H]. `image`: a block → its rows without those of its marks, [n, H], and what determines
    them."""
    ids = passages.ids
    if not passages.blocks:
        return Prompt(token_ids=ids, modality_tokens={"text": len(ids)})
    embeds = embed(torch.tensor(ids, device=device))
    identity: list[int | bytes] = list(ids)
    for block in passages.blocks:
        rows, content = image(block)
        embeds[block.start + 1 : block.stop - 1] = rows.to(device=embeds.device, dtype=embeds.dtype)
        identity[block.start : block.stop] = _identities(content, block.stop - block.start)
    seen = sum(block.stop - block.start for block in passages.blocks)
    return Prompt(
        token_ids=ids,
        embeds=embeds.cpu(),  # the engine does not account device memory that a request holds beyond its KV
        positions=torch.tensor([passages.positions], dtype=torch.long),
        position_delta=passages.next - len(ids),
        identity=identity,
        bidirectional=[(block.start, block.stop) for block in passages.blocks],
        modality_tokens={"text": len(ids) - seen, "image": seen},
        extras={_LATENT_SPANS: [(block.start + 1, block.stop - 1) for block in passages.blocks if block.latent]},
    )


def _identities(content: bytes, count: int) -> list[int | bytes]:
    """What each token of an image's span is, for the prefix cache: the whole image, and its place there. Positions
    follow from what is before it, which the cache's keys include."""
    return [hashlib.blake2b(content + b"%d" % place, digest_size=16).digest() for place in range(count)]


def experts_of(batch: FlatBatch, device: torch.device) -> Experts | None:
    """The experts of a step's tokens; None if no token is a latent."""
    spans, begin = [], 0
    for prompt, start, stop in batch.prompts:
        latent = () if prompt is None else prompt.extras.get(_LATENT_SPANS, ())
        spans += [(begin + first - start, begin + last - start) for first, last in latent if start <= first < stop]
        begin += stop - start
    return experts_for(begin, spans, device) if spans else None


def experts_for(count: int, latents: Iterable[tuple[int, int]], device: torch.device) -> Experts:
    """The experts of `count` rows, of which those in the ranges `latents` are latents."""
    generated = torch.zeros(count, dtype=torch.bool)
    for first, last in latents:
        generated[first:last] = True
    return Experts.of(generated).to(device)  # found on the host, where nothing waits for it
