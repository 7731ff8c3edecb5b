"""The cross-attention inputs of a prompt: which images' encoder states each token sees (Mllama).

An image has one token in the prompt, and many encoder rows. The processor decides by tiles which rows a token sees
(`cross_attention_mask`): from the image's token to the next image's, that image's tiles without padding tiles. For a
token before the first image the mask is empty. The library then has equal scores for all rows, so such a token attends
to every row of every image, and only the layer's MLP is disabled for it (`full_text_row_masked_out_mask`). Segue does
the same, because `generate` does; the hidden state of such a token therefore depends on the images after it.

T prompt tokens, m images, t tiles of each, n rows of one (t · patches), H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from segue.engines.contract import Payload
from segue.kernels.attention.cross_attention import Seen
from segue.messages.errors import StageFailed
from segue.models.omni.multimodal_lm.processor import Processed
from segue.models.shared.encoder_cache import add_content

KIND = "image"
MASK = "cross_attention_mask"
"""[1, T, m, t] from the library's processor."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a sequence that see the same images."""

    start: int
    stop: int | None
    """None: all that follow, replies included."""
    seen: Seen
    unmasked: bool
    """The processor's mask selects the rows; false: it is empty, so all rows are visible."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The images of a prompt: `Prompt.cross_inputs`."""

    rows: dict[bytes, torch.Tensor]
    """By hash, [n, H] on the host: the encoder states."""
    spans: tuple[Span, ...]
    """Cover all tokens, in order."""

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, Span]]:
        """The spans that overlap tokens [start, stop), each with the overlap."""
        for span in self.spans:
            first, last = max(start, span.start), stop if span.stop is None else min(stop, span.stop)
            if first < last:
                yield first, last, span


def units_by_image(processed: Processed) -> list[Payload]:
    """One unit per image, in the format of `units_of`; its tensors are [1, …] each."""
    tensors = {key: value[0] for key, value in processed.tensors[KIND].items() if key != MASK}
    units = []
    for number, place in enumerate(processed.places(KIND)):
        own = {key: value[number : number + 1] for key, value in tensors.items()}
        digest = hashlib.blake2b(KIND.encode(), digest_size=16)
        add_content(digest, own)
        units.append(
            {
                "kind": KIND,
                "hash": digest.digest(),
                "places": torch.tensor([place]),
                "ids": torch.tensor([processed.ids[place]]),
                "tensors": own,
                "alone": False,
            }
        )
    return units


def seen_tiles(length: int, parts: Sequence[tuple[int, Processed]]) -> Payload:
    """`{"seen": LongTensor [T, m], "tiles": t}`: how many tiles of each image a token sees, in a prompt of `length`
    tokens. `parts`: those of it that have images, each with the place of its first token."""
    masks = [part.tensors[KIND][MASK][0] for _, part in parts]
    seen = masks[0].new_zeros(length, sum(mask.shape[1] for mask in masks))
    images = 0
    for (start, _), mask in zip(parts, masks, strict=True):
        assert torch.equal(mask, mask.cumprod(-1)), "padding tiles are the last ones"
        seen[start : start + len(mask), images : images + mask.shape[1]] = mask.sum(-1)
        images += mask.shape[1]
    # a token behind such a part, and one before the images of the next, sees what the token before it sees
    own = torch.where(seen.any(-1), torch.arange(length), 0).cummax(0).values
    return {"seen": seen[own], "tiles": masks[0].shape[-1]}


def shown_by(payload: Payload, media: Sequence[Payload]) -> Shown:
    """Combine the input stage's payload with the encoder's rows of its images, in order. Raises `StageFailed`."""
    tiles: int = payload["tiles"]
    hashes = [medium["hash"] for medium in media]
    for medium in media:
        if len(medium["rows"]) % tiles:
            raise StageFailed(f"an image has {len(medium['rows'])} rows, which is not a multiple of its {tiles} tiles")
    per_tile = [len(medium["rows"]) // tiles for medium in media]
    everything = tuple((key, tiles * rows) for key, rows in zip(hashes, per_tile, strict=True))
    spans: list[Span] = []
    counts = [tuple(row) for row in payload["seen"].tolist()]
    for seen, tokens in groupby(counts):
        start = spans[-1].stop or 0 if spans else 0
        own = tuple((hashes[i], count * per_tile[i]) for i, count in enumerate(seen) if count)
        spans.append(Span(start, start + len(list(tokens)), own or everything, bool(own)))
    last = spans.pop()
    spans.append(Span(last.start, None, last.seen, last.unmasked))
    return Shown(dict(zip(hashes, (medium["rows"] for medium in media), strict=True)), tuple(spans))


def identity_of(ids: torch.Tensor, units: Sequence[Payload], shown: Shown) -> list[int | bytes]:
    """[T] prefix-cache keys: the image for an image's token; for a token that sees everything, all images and its id;
    else its id, since the preceding tokens determine what it sees."""
    what: list[int | bytes] = list(ids.tolist())
    for unit in units:
        what[int(unit["places"][0])] = unit["hash"]
    for start, stop, span in shown.within(0, len(ids)):
        if not span.unmasked:
            for place in range(start, stop):
                digest = hashlib.blake2b(repr((what[place], span.seen)).encode(), digest_size=16)
                what[place] = digest.digest()
    return what
