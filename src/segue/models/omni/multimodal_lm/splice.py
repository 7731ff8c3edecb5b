"""Put media into a prompt that the client sent as token ids.

The ids between the media must stay as they are, whether or not the tokenizer would make them of their text. So the
processor gets a text in which one special token, the *border*, stands for the ids between two media, and its result is
put around the client's ids. A processor may look at the tokens around a placeholder, or replace them as well (clips of
Qwen3-VL): added tokens directly before and after a placeholder are part of that text.

T tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from segue.messages.errors import InvalidRequest
from segue.models.omni.multimodal_lm.processor import Medium, Processed, Processor
from segue.models.shared.text.placeholders import Place, check_counts, expanded, one_each


@dataclass(frozen=True, slots=True)
class _Block:
    """Ids [start, stop) of the client's prompt, which `text` stands for in the processor's."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True, slots=True)
class _Bordered:
    """The processor's result for a text with a border before and after each block."""

    made: Processed
    borders: list[int]

    def span(self, index: int) -> range:
        """The positions of a block's ids."""
        return range(self.borders[index] + 1, self.borders[index + 1])


def spliced(
    processor: Processor, ids: Sequence[int], media: Mapping[str, Sequence[Medium]], field: str, *, follows: bool
) -> tuple[Processed, list[int]]:
    """The prompt with its media, and [T] the position of each token in the processor's own result. `follows`: it
    follows another prompt, without what the processor puts at a prompt's beginning and end.

    Each medium has one placeholder, or each exactly the ids that the processor would put in its place. Raises
    `InvalidRequest` that names `field` otherwise, and the library's exceptions.
    """
    counts = {kind: len(own) for kind, own in media.items()}
    rows = processor.rows
    places = one_each(ids, processor.placeholder_ids, counts)
    has_rows = _has_rows(processor, ids)
    if places is not None and not has_rows:
        blocks = _blocks(processor, ids, places)
        given = _run(processor, [block.text for block in blocks], media, field)
        edges = (range(given.borders[0]), range(given.borders[-1] + 1, len(given.made.ids)))
        own = [given.span(index) for index in range(len(blocks))]
        return _assembled(ids, blocks, given, own, (range(0), range(0)) if follows else edges)
    if not has_rows:
        apart = [kind for kind in rows if rows[kind] != processor.placeholder_ids[kind]]
        found = {kind: list(ids).count(processor.placeholder_ids[kind]) for kind in apart}
        check_counts(found, {kind: counts.get(kind, 0) for kind in apart}, field)
    order = [(kind, index) for kind, count in counts.items() for index in range(count)]
    given = _run(processor, [processor.sample(kind) for kind, _ in order], media, field)
    spans = {which: _inner(processor, which[0], given, number) for number, which in enumerate(order)}
    expansions = {
        kind: [[given.made.ids[place] for place in spans[kind, index]] for index in range(count)]
        for kind, count in counts.items()
    }
    places = expanded(ids, rows, expansions, field)
    if [(place.kind, place.index) for place in places] != order:  # kinds alternate in the prompt
        given = _run(processor, [processor.sample(place.kind) for place in places], media, field)
        spans = {
            (place.kind, place.index): _inner(processor, place.kind, given, number)
            for number, place in enumerate(places)
        }
    blocks = [_Block(place.start, place.stop, "") for place in places]
    own = [spans[place.kind, place.index] for place in places]
    return _assembled(ids, blocks, given, own, (range(0), range(0)))


def _has_rows(processor: Processor, ids: Sequence[int]) -> bool:
    """Whether ids stand for rows that are no placeholders: the client has expanded them."""
    others = {*processor.rows.values()} - {*processor.placeholder_ids.values()}
    return any(token in others for token in ids)


def _blocks(processor: Processor, ids: Sequence[int], places: Sequence[Place]) -> list[_Block]:
    """Media with the added tokens around them; those without other ids between them are one block."""
    added = processor.tokenizer.added_tokens_decoder
    media = {place.start for place in places}
    blocks: list[_Block] = []
    for place in places:
        start, stop = place.start, place.stop
        least = blocks[-1].stop if blocks else 0
        if start > least and ids[start - 1] in added:
            start -= 1
        if stop < len(ids) and stop not in media and ids[stop] in added:
            stop += 1
        if blocks and start == least:
            start = blocks.pop().start
        blocks.append(_Block(start, stop, "".join(added[token].content for token in ids[start:stop])))
    return blocks


def _run(processor: Processor, texts: Sequence[str], media: Mapping[str, Sequence[Medium]], field: str) -> _Bordered:
    border, token = processor.border(texts)
    text = border.join(["", *texts, ""])
    made = processor(text, {kind: [*own] for kind, own in media.items()}, add_special_tokens=False)
    borders = [place for place, each in enumerate(made.ids) if each == token]
    if len(borders) != len(texts) + 1:
        raise InvalidRequest(
            "this model's processor does not put media between token ids; send the whole conversation as messages",
            field=field,
        )
    return _Bordered(made, borders)


def _inner(processor: Processor, kind: str, given: _Bordered, index: int) -> range:
    """The positions of the ids of one medium, without the tokens around its placeholder in a sample text."""
    span = given.span(index)
    before, after = processor.around(kind)
    if before is not None and given.made.ids[span.start] == before and given.made.ids[span.stop - 1] == after:
        return span[1:-1]
    return span


def _assembled(
    ids: Sequence[int],
    blocks: Sequence[_Block],
    given: _Bordered,
    spans: Sequence[range],
    edges: tuple[range, range],
) -> tuple[Processed, list[int]]:
    """The client's ids with the ids of `spans` in the places of the blocks; `edges`: positions of the ids that the
    processor puts at the beginning and the end."""
    made = given.made
    whole = [made.ids[place] for place in edges[0]]
    origin = [*edges[0]]
    at = 0
    for block, span, border in zip(blocks, spans, given.borders, strict=False):
        whole += ids[at : block.start]
        origin += [border] * (block.start - at)
        whole += [made.ids[place] for place in span]
        origin += span
        at = block.stop
    whole += [*ids[at:], *(made.ids[place] for place in edges[1])]
    origin += [*[given.borders[-1]] * (len(ids) - at), *edges[1]]
    types = made.token_types
    return replace(
        made,
        ids=whole,
        token_types=None if types is None else [types[place] for place in origin],
        named_types={name: [own[place] for place in origin] for name, own in made.named_types.items()},
    ), origin
