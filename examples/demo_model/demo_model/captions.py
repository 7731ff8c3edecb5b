"""What there is to draw and to edit: captions, instructions, and scenes that follow them. The language of `draw.py`."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from demo_model.questions import NUMBERS
from demo_model.scenes import COLOURS, GROUNDS, PLACES, RADII, SHAPES, Thing, placed, resized

MOST = 5
"""Things in one picture."""
HELD_OUT = 12
"""One of so many captions and edits is never trained on."""
RELATIONS: dict[str, Callable[[Thing, Thing], bool]] = {
    "above": lambda one, other: one.cell // 3 < other.cell // 3,
    "below": lambda one, other: one.cell // 3 > other.cell // 3,
    "to the left of": lambda one, other: one.cell % 3 < other.cell % 3,
    "to the right of": lambda one, other: one.cell % 3 > other.cell % 3,
}
_WHERE = {
    name: f"{'in' if name == 'middle' else 'at' if name in ('top', 'bottom') else 'on'} the {name}" for name in PLACES
}


@dataclass(frozen=True)
class Group:
    """`count` things alike; None where the words leave something open. A place is stated of single things only."""

    count: int = 1
    size: str | None = None
    colour: str | None = None
    shape: str | None = None
    place: str | None = None

    def fits(self, thing: Thing) -> bool:
        stated = ("size", "colour", "shape", "place")
        return all(getattr(self, name) in (None, getattr(thing, name)) for name in stated)

    def __str__(self) -> str:
        noun = " ".join(word for word in (self.size, self.colour, self.shape or "thing") if word)
        if self.count > 1:
            return f"{NUMBERS[self.count]} {noun}s"
        return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}{' ' + _WHERE[self.place] if self.place else ''}"


@dataclass(frozen=True)
class Caption:
    """All that is in a picture. `relation`: of each thing of the first group to each of the second, if there are two;
    `ground`: whether the background is dark or pale, if stated."""

    groups: tuple[Group, ...]
    relation: str | None = None
    ground: str | None = None

    def __str__(self) -> str:
        words = [str(group) for group in self.groups]
        if self.relation:
            text = f"{words[0]} {self.relation} {words[1]}"
        else:
            text = ", ".join([*words[:-2], " and ".join(words[-2:])])
        return f"{text} on a {self.ground} background" if self.ground else text

    def is_shown(self, things: Sequence[Thing]) -> bool:
        """Whether these things, and no others, are what the words say. The background is not compared."""
        return self._shown(frozenset(range(len(things))), things, ())

    def _shown(self, left: frozenset[int], things: Sequence[Thing], chosen: tuple[tuple[int, ...], ...]) -> bool:
        if len(chosen) == len(self.groups):
            related = self.relation is None or all(
                RELATIONS[self.relation](things[one], things[other]) for one in chosen[0] for other in chosen[1]
            )
            return not left and related
        group = self.groups[len(chosen)]
        fitting = [index for index in sorted(left) if group.fits(things[index])]
        return any(self._shown(left - {*one}, things, (*chosen, one)) for one in combinations(fitting, group.count))


def caption_of(text: str) -> Caption:
    """The inverse of `str`, for any capitals and a final full stop. Raises `ValueError` for other words."""
    words = text.strip().rstrip(".").lower()
    ground = re.search(r" on a (dark|pale) background$", words)
    related = re.search(rf" ({'|'.join(RELATIONS)}) (?=an? |{'|'.join(NUMBERS)})", words)
    body = words[: ground.start()] if ground else words
    parts = re.split(f" {related[1]} " if related else ", | and ", body)
    return Caption(tuple(map(_group, parts)), related and related[1], ground and ground[1])


_GROUP = re.compile(
    rf"(an?|{'|'.join(NUMBERS[2:5])})(?: ({'|'.join(RADII)}))?(?: ({'|'.join(COLOURS)}))? ({'|'.join(SHAPES)}|thing)s?"
    rf"(?: (?:in|at|on) the ({'|'.join(sorted(PLACES, key=len, reverse=True))}))?"
)


def _group(words: str) -> Group:
    found = _GROUP.fullmatch(words)
    if found is None:
        raise ValueError(f"{words!r} is not in the captions' language; an example: {Group(2, 'big', 'red', 'star')}")
    number, size, colour, shape, place = found.groups()
    count = NUMBERS.index(number) if number in NUMBERS else 1
    return Group(count, size, colour, None if shape == "thing" else shape, place)


def random_caption(rng: random.Random) -> Caption:
    """A caption that some scene of at most `MOST` things follows."""
    counts = [rng.choices(range(1, 5), (5, 3, 2, 2))[0] for _ in range(rng.choices((1, 2, 3), (4, 5, 2))[0])]
    if sum(counts) > MOST:
        return random_caption(rng)
    relation = rng.choice(list(RELATIONS)) if len(counts) == 2 and rng.random() < 0.5 else None
    places = rng.sample(PLACES, len(counts))
    groups = []
    for count, place in zip(counts, places, strict=True):
        size, colour, shape = rng.choice(list(RADII)), rng.choice(list(COLOURS)), rng.choice(SHAPES)
        keep = [rng.random() < share for share in (0.35, 0.93, 0.93, 0.5)]
        groups.append(
            Group(
                count,
                size if keep[0] else None,
                colour if keep[1] else None,
                shape if keep[2] else None,
                place if keep[3] and count == 1 and not relation else None,
            )
        )
    if len({(group.colour, group.shape) for group in groups}) < len(groups):
        return random_caption(rng)
    return Caption(tuple(groups), relation, rng.choice([None, None, *GROUNDS]))


def things_for(caption: Caption, rng: random.Random) -> tuple[Thing, ...]:
    """Things that a caption describes."""
    wanted = [group for group in caption.groups for _ in range(group.count)]
    while True:
        cells = rng.sample(range(len(PLACES)), len(wanted))
        for index, group in enumerate(wanted):
            if group.place:
                cells[index] = PLACES.index(group.place)
        if len(set(cells)) < len(cells):
            continue
        things = tuple(
            placed(
                rng,
                cell,
                group.size or rng.choice(list(RADII)),
                group.colour or rng.choice(list(COLOURS)),
                group.shape or rng.choice(SHAPES),
            )
            for group, cell in zip(wanted, cells, strict=True)
        )
        if caption.relation is None or caption.is_shown(things):
            return things


@dataclass(frozen=True)
class Edit:
    """`text`: what is to be done with `before`; `after`: the things in the picture then."""

    text: str
    before: tuple[Thing, ...]
    after: tuple[Thing, ...]

    def __str__(self) -> str:
        return self.text


def random_edit(rng: random.Random) -> Edit:
    """An instruction about a random scene: a new colour, size, shape or place of a thing, one more or one less."""
    cells = rng.sample(range(len(PLACES)), rng.randint(1, MOST - 1))
    before = tuple(
        placed(rng, cell, rng.choice(list(RADII)), rng.choice(list(COLOURS)), rng.choice(SHAPES)) for cell in cells
    )
    kind = rng.choice(["colour", "all", "size", "shape", "place", "less", "more"])
    free = rng.choice([cell for cell in range(len(PLACES)) if cell not in cells])
    new = placed(rng, free, rng.choice(list(RADII)), rng.choice(list(COLOURS)), rng.choice(SHAPES))
    if kind == "more":
        return Edit(f"add {Group(1, new.size, new.colour, new.shape, new.place)}", before, (*before, new))
    if kind == "all":
        return Edit(f"make everything {new.colour}", before, tuple(replace(one, colour=new.colour) for one in before))
    thing = rng.choice(before)
    name = _name(thing, before, rng)
    if name is None:
        return random_edit(rng)
    text, changed = {
        "colour": (f"make {name} {new.colour}", replace(thing, colour=new.colour)),
        "size": (f"make {name} {new.size}", resized(thing, new.size)),
        "shape": (f"turn {name} into {Group(shape=new.shape)}", replace(thing, shape=new.shape)),
        "place": (f"move {name} to the {new.place}", placed(rng, free, thing.size, thing.colour, thing.shape)),
        "less": (f"remove {name}", None),
    }[kind]
    if changed == thing or (changed is None and len(before) == 1):
        return random_edit(rng)
    return Edit(text, before, tuple(one for one in (changed if one is thing else one for one in before) if one))


def _name(thing: Thing, things: Sequence[Thing], rng: random.Random) -> str | None:
    """Words that mean this thing only, or None if there are none."""
    if len(things) == 1 and rng.random() < 0.6:
        return "it"
    for colour, shape in rng.sample([(thing.colour, None), (None, thing.shape), (thing.colour, thing.shape)], 3):
        group = Group(1, None, colour, shape)
        if sum(map(group.fits, things)) == 1:
            return f"the {str(group).split(' ', 1)[1]}"
    return None


def is_held_out(what: Caption | Edit) -> bool:
    """Whether no training may see a caption, or an edit of a scene that looks alike."""
    looks = sorted((one.size, one.colour, one.shape, one.cell) for one in what.before) if isinstance(what, Edit) else ""
    return zlib.crc32(f"{what} {looks}".encode()) % HELD_OUT == 0


def same_things(found: Sequence[Thing], wanted: Sequence[Thing]) -> bool:
    """Whether two pictures show the same things in the same cells, wherever in these."""
    looks = [sorted((one.size, one.colour, one.shape, one.cell) for one in things) for things in (found, wanted)]
    return looks[0] == looks[1]
