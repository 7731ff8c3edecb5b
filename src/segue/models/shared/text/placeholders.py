"""Find the places of media in a prompt: one placeholder for each medium, or the ids that the processor puts there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segue.messages.errors import InvalidRequest
from segue.messages.request import MULTI_MODAL_DATA


@dataclass(frozen=True, slots=True)
class Place:
    """Ids [start, stop) of a prompt that stand for one medium."""

    kind: str
    index: int
    """Of the medium, among those of its kind."""
    start: int
    stop: int


def check_no_media(ids: Sequence[int], tokens: Mapping[str, frozenset[int]], field: str) -> None:
    """Raise `InvalidRequest` if ids of a prompt without media stand for media. `tokens`: kind → its ids."""
    for kind, own in tokens.items():
        if any(token in own for token in ids):
            raise _misfit(sum(token in own for token in ids), kind, [], field)


def check_counts(found: Mapping[str, int], media: Mapping[str, int], field: str) -> None:
    """Raise `InvalidRequest` unless a text has one placeholder for each medium. Both: kind → number."""
    for kind in sorted({*found, *media}):
        if found.get(kind, 0) != media.get(kind, 0):
            raise _misfit(found.get(kind, 0), kind, [1] * media.get(kind, 0), field)


def one_each(ids: Sequence[int], placeholders: Mapping[str, int], media: Mapping[str, int]) -> list[Place] | None:
    """The places if each medium has one placeholder; None if the counts differ.

    `placeholders`: kind → id; `media`: kind → number.
    """
    kinds = {token: kind for kind, token in placeholders.items()}
    places: list[Place] = []
    seen: Counter[str] = Counter()
    for index, token in enumerate(ids):
        if (kind := kinds.get(token)) is not None:
            places.append(Place(kind, seen[kind], index, index + 1))
            seen[kind] += 1
    return places if seen == Counter({kind: count for kind, count in media.items() if count}) else None


def expanded(
    ids: Sequence[int], rows: Mapping[str, int], expansions: Mapping[str, Sequence[Sequence[int]]], field: str
) -> list[Place]:
    """The places if each medium has the ids that the processor puts there, in the order of the prompt.

    `rows`: kind → the id of a row; `expansions`: kind → for each medium its ids. Raises `InvalidRequest` if rows stand
    elsewhere, or a medium has no place.
    """
    kinds = {token: kind for kind, token in rows.items()}
    places: list[Place] = []
    seen: Counter[str] = Counter()
    at = 0
    while (first := next((index for index in range(at, len(ids)) if ids[index] in kinds), None)) is not None:
        kind = kinds[ids[first]]
        waiting = list(expansions.get(kind, ())[seen[kind] :])
        own = list(waiting[0]) if waiting else []
        # an expansion may begin with other ids than rows
        start = first - next((index for index, token in enumerate(own) if token in kinds), 0)
        if not own or start < at or list(ids[start : start + len(own)]) != own:
            break
        places.append(Place(kind, seen[kind], start, start + len(own)))
        seen[kind] += 1
        at = start + len(own)
    if any(token in kinds for token in ids[at:]) or any(seen[kind] != len(own) for kind, own in expansions.items()):
        raise _misplaced(ids, rows, expansions, field)
    return places


def _misplaced(
    ids: Sequence[int], rows: Mapping[str, int], expansions: Mapping[str, Sequence[Sequence[int]]], field: str
) -> InvalidRequest:
    """The error about the first kind whose placeholders are neither one each nor expanded; about any if all are."""
    every = [own for each in expansions.values() for own in each]
    errors = []
    for kind, row in sorted(rows.items()):
        found, media = list(ids).count(row), expansions.get(kind, ())
        lengths = [list(own).count(row) for own in media]
        fits = found in (len(media), sum(list(own).count(row) for own in every))
        errors.append((fits, _misfit(found, kind, lengths, field)))
    return min(errors, key=lambda entry: entry[0])[1]


def _misfit(found: int, kind: str, lengths: Sequence[int], field: str) -> InvalidRequest:
    """`lengths`: placeholders of each medium of the kind, expanded."""
    many = f"placeholder{'' if found == 1 else 's'} for {kind}"
    right = "write one for each" if lengths else f"send each {kind} there"
    if any(length > 1 for length in lengths):
        right += f", or exactly as many as they take, in one run each: {', '.join(map(str, lengths))}"
    return InvalidRequest(
        f"{field} has {found} {many}, but {MULTI_MODAL_DATA} has {len(lengths)} {kind}: {right}", field=field
    )
