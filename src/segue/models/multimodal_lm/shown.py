"""What a prompt shows to the layers of a decoder that look at media by cross-attention (Mllama).

A picture has one token in the prompt, and many rows beside it. Which of them a token sees, the processor says, by tiles
(`cross_attention_mask`): from the picture's token on until the next picture's, that picture's tiles, but not those that
fill it up to a full number. A token that sees none, because it stands before the first picture, is not left alone by
the library: its masked scores are all alike, so its attention is over every row of every picture, and only the layer's
MLP is switched off for it (`full_text_row_masked_out_mask`). That is done here, too, because it is what `generate`
does; so such a token is another one for other pictures behind it.

T prompt tokens, m pictures, t tiles of each, n rows of one (t · patches), H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from segue.engines.contract import Payload
from segue.kernels.cross_attention import Seen
from segue.messages.errors import StageFailed
from segue.models.encoder_cache import add_content
from segue.models.multimodal_lm.processor import Processed

KIND = "image"
MASK = "cross_attention_mask"
"""[1, T, m, t] of the library's processor."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a sequence that see the same."""

    start: int
    stop: int | None
    """None: all that follow, replies included."""
    seen: Seen
    unmasked: bool
    """They see what the processor says, and not everything because it says nothing."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The pictures of a prompt: `Prompt.beside`."""

    rows: dict[bytes, torch.Tensor]
    """By hash, [n, H] on the host: what the layers make keys and values of."""
    spans: tuple[Span, ...]
    """All tokens, in order."""

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, Span]]:
        """The spans that tokens [start, stop) are in, with the range of these that is."""
        for span in self.spans:
            first, last = max(start, span.start), stop if span.stop is None else min(stop, span.stop)
            if first < last:
                yield first, last, span


def units_by_picture(processed: Processed) -> list[Payload]:
    """A unit per picture, as `units_of` makes them; its tensors are [1, …] each."""
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


def seen_tiles(processed: Processed) -> Payload:
    """`{"seen": LongTensor [T, m], "tiles": t}`: how many tiles of each picture a token sees."""
    mask = processed.tensors[KIND][MASK][0]
    assert torch.equal(mask, mask.cumprod(-1)), "tiles that fill up are the last ones"
    return {"seen": mask.sum(-1), "tiles": mask.shape[-1]}


def shown_by(payload: Payload, media: Sequence[Payload]) -> Shown:
    """Of the input stage's payload, and the encoder's rows of its pictures, in order. Raises `StageFailed`."""
    tiles: int = payload["tiles"]
    hashes = [medium["hash"] for medium in media]
    for medium in media:
        if len(medium["rows"]) % tiles:
            raise StageFailed(f"a picture has {len(medium['rows'])} rows, which are not those of {tiles} tiles")
    per_tile = [len(medium["rows"]) // tiles for medium in media]
    everything = tuple((key, tiles * rows) for key, rows in zip(hashes, per_tile, strict=True))
    spans: list[Span] = []
    counts = [tuple(row) for row in payload["seen"].tolist()]
    for seen, tokens in groupby(counts):
        start = spans[-1].stop or 0 if spans else 0
        told = tuple((hashes[i], count * per_tile[i]) for i, count in enumerate(seen) if count)
        spans.append(Span(start, start + len(list(tokens)), told or everything, bool(told)))
    last = spans.pop()
    spans.append(Span(last.start, None, last.seen, last.unmasked))
    return Shown(dict(zip(hashes, (medium["rows"] for medium in media), strict=True)), tuple(spans))


def identity_of(ids: torch.Tensor, units: Sequence[Payload], shown: Shown) -> list[int | bytes]:
    """[T] what each token is: the picture, where one's token stands; for a token that sees everything, all of that as
    well; else its id, which with all before it says what it sees."""
    what: list[int | bytes] = list(ids.tolist())
    for unit in units:
        what[int(unit["places"][0])] = unit["hash"]
    for start, stop, span in shown.within(0, len(ids)):
        if not span.unmasked:
            for place in range(start, stop):
                digest = hashlib.blake2b(repr((what[place], span.seen)).encode(), digest_size=16)
                what[place] = digest.digest()
    return what
