"""What there is to draw and to edit: captions, instructions, and scenes that follow them."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from demo_model.data.questions import NUMBERS
from demo_model.data.scenes import COLOURS, GROUNDS, PLACES, RADII, SHAPES, Scene, Thing, centre

MOST = 5
"""Things in one picture."""
HELD_OUT = 12
"""One of so many captions and edits is never trained on."""
KINDS = ("colour", "all", "size", "shape", "place", "less", "more")
"""Of edits."""
HARDER = (*["colour"] * 4, "all", *["size"] * 3, *["shape"] * 2, *["place"] * 10, "less", "more")
"""For the training: more of those for which a thing must be found, and drawn anew as it was. One in two of new sizes is
the old one, and another kind is taken."""
RELATIONS: dict[str, Callable[[Thing, Thing], bool]] = {
    "above": lambda one, other: one.cell // 3 < other.cell // 3,
    "below": lambda one, other: one.cell // 3 > other.cell // 3,
    "to the left of": lambda one, other: one.cell % 3 < other.cell % 3,
    "to the right of": lambda one, other: one.cell % 3 > other.cell % 3,
}
_SPREAD = {1: (1,), 2: (0, 2), 3: (0, 1, 2)}
"""Where in a row so many things stand."""
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
    """Things that a caption describes, set out tidily: big, each in the middle of its cell, and where the words leave
    the places open always in the same ones, so that a picture depends on little else than its words."""
    things = []
    for group, cells in zip(caption.groups, _laid_out(caption), strict=True):
        colour, shape = group.colour or rng.choice(list(COLOURS)), group.shape or rng.choice(SHAPES)
        things += [Thing(group.size or "big", colour, shape, cell, *centre(cell)) for cell in cells]
    return tuple(things)


def _laid_out(caption: Caption) -> list[list[int]]:
    """The cells of each group: those stated, or a row or two of its own; a column where the relation is sideways."""
    used = {PLACES.index(group.place) for group in caption.groups if group.place}
    found = []
    for index, group in enumerate(caption.groups):
        if group.place:
            cells = [PLACES.index(group.place)]
        else:
            cells = next(line for line in _lines(index, caption, group.count) if used.isdisjoint(line))
        used.update(cells)
        found.append(cells)
    return found


def _lines(index: int, caption: Caption, count: int) -> Iterator[list[int]]:
    """Cells for `count` things of the group `index`, the best first. `across` and `along` a line: how much a cell's
    number grows by a step."""
    groups = len(caption.groups)
    first = {1: 1, 2: 2 * index, 3: index}[groups]
    lines = sorted(range(3), key=lambda line: abs(line - first))
    if caption.relation in ("below", "to the right of"):
        lines = [2 - line for line in lines]
    across, along = (1, 3) if caption.relation in ("to the left of", "to the right of") else (3, 1)
    if count < 4:
        yield from ([across * line + along * at for at in _SPREAD[count]] for line in lines)
    else:
        pairs = [(0, 2)] if groups == 1 else combinations(lines, 2)
        yield from (sorted(across * line + along * at for line in pair for at in _SPREAD[2]) for pair in pairs)


@dataclass(frozen=True)
class Edit:
    """`text`: what is to be done with `before`; `after`: the things in the picture then, on the same background."""

    text: str
    before: tuple[Thing, ...]
    after: tuple[Thing, ...]
    ground: str | None = None

    def __str__(self) -> str:
        return self.text


def random_edit(rng: random.Random, kinds: Sequence[str] = KINDS) -> Edit:
    """An instruction about a random drawing: a new colour, size, shape or place of a thing, one more or one less."""
    things = tuple(
        Thing(rng.choice(list(RADII)), rng.choice(list(COLOURS)), rng.choice(SHAPES), cell, *centre(cell))
        for cell in rng.sample(range(len(PLACES)), rng.randint(2, MOST))
    )
    before, new = things[:-1], things[-1]
    kind, ground = rng.choice(kinds), rng.choice(list(GROUNDS))
    if kind == "more":
        return Edit(f"add {Group(1, new.size, new.colour, new.shape, new.place)}", before, things, ground)
    if kind == "all":
        after = tuple(replace(one, colour=new.colour) for one in before)
        if after == before:
            return random_edit(rng, kinds)
        return Edit(f"make everything {new.colour}", before, after, ground)
    thing = rng.choice(before)
    name = _name(thing, before, rng)
    if name is None:
        return random_edit(rng, kinds)
    text, changed = {
        "colour": (f"make {name} {new.colour}", replace(thing, colour=new.colour)),
        "size": (f"make {name} {new.size}", replace(thing, size=new.size)),
        "shape": (f"turn {name} into {Group(shape=new.shape)}", replace(thing, shape=new.shape)),
        "place": (f"move {name} to the {new.place}", replace(thing, cell=new.cell, x=new.x, y=new.y)),
        "less": (f"remove {name}", None),
    }[kind]
    if changed == thing or (changed is None and len(before) == 1):
        return random_edit(rng, kinds)
    after = tuple(one for one in (changed if one is thing else one for one in before) if one)
    return Edit(text, before, after, ground)


def _name(thing: Thing, things: Sequence[Thing], rng: random.Random) -> str | None:
    """Words that mean this thing only, or None if there are none."""
    if len(things) == 1 and rng.random() < 0.6:
        return "it"
    for colour, shape in rng.sample([(thing.colour, None), (None, thing.shape), (thing.colour, thing.shape)], 3):
        group = Group(1, None, colour, shape)
        if sum(map(group.fits, things)) == 1:
            return f"the {str(group).split(' ', 1)[1]}"
    return None


def drawing(things: tuple[Thing, ...], seed: int, ground: str | None = None) -> Scene:
    """A picture of the sort that is drawn and edited: on one colour, dark or pale by the seed if that is not stated."""
    return Scene(things, seed, ground=ground or list(GROUNDS)[seed % len(GROUNDS)])


def is_held_out(what: Caption | Edit) -> bool:
    """Whether no training may see a caption's words, or an edit of a scene that looks alike. Other words may have meant
    what a held-out caption says."""
    looks = sorted((one.size, one.colour, one.shape, one.cell) for one in what.before) if isinstance(what, Edit) else ""
    return zlib.crc32(f"{what} {looks}".encode()) % HELD_OUT == 0


def shows(what: Caption | Edit, things: Sequence[Thing]) -> bool:
    """Whether these things, and no others, are what a caption says, or what an edit leaves in the same cells, wherever
    in these. The background is not compared."""
    if isinstance(what, Caption):
        return what.is_shown(things)
    looks = [sorted((one.size, one.colour, one.shape, one.cell) for one in some) for some in (things, what.after)]
    return looks[0] == looks[1]
