"""Batches of captions and instructions: alone, with what they say, and with the pictures that follow them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.data import IGNORED
from demo_model.data.captions import (
    HARDER,
    Caption,
    Edit,
    drawing,
    is_held_out,
    random_caption,
    random_edit,
    things_for,
)
from demo_model.data.prompts import tokenizer
from demo_model.data.scenes import COLOURS, GROUNDS, PLACES, RADII, SHAPES, Canvas, Scene, canvas

SHORT, LONG = 32, 512
"""Tokens that a prompt is padded to, if it is not longer; the network sees the padding. `LONG` is the pipeline's
default, and seldom seen in training."""
VERBS = ("make", "turn", "move", "remove", "add")
SORTS: tuple[tuple[str, ...], ...] = (tuple(RADII), tuple(COLOURS), SHAPES, PLACES)
"""Sorts of words; of each 0 stands for none, 1 for the first."""


@dataclass(frozen=True)
class Words:
    """Texts: `ids` and `mask`, [B, tokens]. `cells`: int64 [B, cells, 3], size, colour and shape of what is to be drawn
    there; `ground`: int64 [B, 1], the background; `asked`: int64 [B, 9], of instructions the verb, and sorts of words
    of what is meant and of what is to become of it; -100 where the words leave that open or are of the other kind."""

    ids: Tensor
    mask: Tensor
    cells: Tensor
    ground: Tensor
    asked: Tensor


class Worded:
    """Makes batches of `Words`."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size

    def __call__(self, step: int) -> Words:
        rng = random.Random(f"words/{step}")
        texts: list[str] = []
        shapes = (len(PLACES), 3), (1,), (9,)
        cells, ground, asked = (torch.full((self._size, *shape), IGNORED) for shape in shapes)
        while len(texts) < self._size:
            what: Caption | Edit = random_edit(rng) if len(texts) % 3 == 2 else random_caption(rng)
            if is_held_out(what):
                continue
            if isinstance(what, Edit):
                asked[len(texts)] = torch.tensor(_asked(what.text))
            else:
                cells[len(texts)] = _cells(what, rng)
                ground[len(texts)] = 1 + list(GROUNDS).index(what.ground) if what.ground else 0
            texts.append(said(rng, str(what)))
        return Words(*encoded(self._tokenizer, texts), cells, ground, asked)


def said(rng: random.Random, text: str) -> str:
    """With or without a capital and a full stop."""
    return (text[0].upper() + text[1:] if rng.random() < 0.4 else text) + ("." if rng.random() < 0.3 else "")


def encoded(tokenizer: Tokenizer, texts: list[str], length: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, tokens] as the pipeline makes them: a turn in Qwen 3's format, filled up on the right to at
    least `length`."""
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    found = [one.ids for one in tokenizer.encode_batch([turn.format(text) for text in texts])]
    length = max(length, -(-max(map(len, found)) // 16) * 16)
    ids = torch.full((len(found), length), tokenizer.token_to_id("<|endoftext|>"))
    for row, one in zip(ids, found, strict=True):
        row[: len(one)] = torch.tensor(one)
    return ids, torch.arange(length) < torch.tensor([[len(one)] for one in found])


def _cells(caption: Caption, rng: random.Random) -> Tensor:
    """int64 [cells, 3]: `Words.cells` of one caption."""
    found = torch.zeros(len(PLACES), 3, dtype=torch.long)
    groups = (group for group in caption.groups for _ in range(group.count))
    for thing, group in zip(things_for(caption, rng), groups, strict=True):
        looks = zip(SORTS, (thing.size, group.colour, group.shape), strict=False)
        found[thing.cell] = torch.tensor([1 + sort.index(one) if one else IGNORED for sort, one in looks])
    return found


def _asked(text: str) -> list[int]:
    """`Words.asked` of one instruction."""
    verb, rest = text.split(" ", 1)
    cut = {"make": rest.rpartition(" "), "add": ("", "", rest), "remove": (rest, "", "")}
    meant, _, become = cut.get(verb) or rest.partition(" into " if verb == "turn" else " to ")
    return [1 + VERBS.index(verb), *_labels(meant.split()), *_labels(become.split())]


def _labels(words: list[str]) -> list[int]:
    """Which word of each sort is among these; a place is what follows the last `the`."""
    place = " ".join(words[-words[::-1].index("the") :]) if "the" in words else ""
    found = [next((1 + index for index, one in enumerate(sort) if one in words), 0) for sort in SORTS[:3]]
    return [*found, 1 + PLACES.index(place) if place in PLACES else 0]


@dataclass(frozen=True)
class Prompts:
    """Captions, or instructions: `ids` and `mask`, [B, tokens]; what is to be drawn, and of edits what is given."""

    ids: Tensor
    mask: Tensor
    after: Canvas
    before: Canvas | None


class Prompted:
    """Makes batches of `Prompts`, none of them held out: captions, and in two steps of three edits, of `HARDER` kinds.
    Two of sixteen have `longest` tokens, and fewer prompts."""

    def __init__(self, directory: Path, size: int, longest: int = LONG) -> None:
        self.tokenizer, self.size, self.longest = tokenizer(directory / "tokenizer"), size, longest

    def __call__(self, step: int) -> Prompts:
        rng = random.Random(f"draw/{step}")
        length = self.longest if step % 16 > 13 else SHORT
        size = self.size if length == SHORT else max(self.size // 8, 1)
        texts: list[str] = []
        before: list[Scene] = []
        after: list[Scene] = []
        while len(texts) < size:
            what: Caption | Edit = random_edit(rng, HARDER) if step % 3 else random_caption(rng)
            if is_held_out(what):
                continue
            seed = rng.getrandbits(32)
            if isinstance(what, Edit):
                before.append(drawing(what.before, seed, what.ground))
            things = what.after if isinstance(what, Edit) else things_for(what, rng)
            after.append(drawing(things, seed, what.ground))
            texts.append(said(rng, str(what)))
        return Prompts(*encoded(self.tokenizer, texts, length), canvas(after), canvas(before) if before else None)
