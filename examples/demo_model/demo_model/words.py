"""Teach `draw.py`'s text encoder to read: from captions what is to be in each cell of a picture, from instructions what
is to be done with what. It learns that from words alone, thousands of times faster than from pictures of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from demo_model.captions import Caption, Edit, is_held_out, random_caption, random_edit, things_for
from demo_model.muon import inside
from demo_model.scenes import COLOURS, GROUNDS, PLACES, RADII, SHAPES
from demo_model.training import Part

_IGNORED = -100
_VERBS = ("make", "turn", "move", "remove", "add")
_SORTS: tuple[tuple[str, ...], ...] = (tuple(RADII), tuple(COLOURS), SHAPES, PLACES)
"""Sorts of words; of each 0 stands for none, 1 for the first."""
_INSTRUCTION = tuple(1 + len(one) for one in (_VERBS, *_SORTS, *_SORTS))


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
        cells, ground, asked = (torch.full((self._size, *shape), _IGNORED) for shape in shapes)
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
        looks = zip(_SORTS, (thing.size, group.colour, group.shape), strict=False)
        found[thing.cell] = torch.tensor([1 + sort.index(one) if one else _IGNORED for sort, one in looks])
    return found


def _asked(text: str) -> list[int]:
    """`Words.asked` of one instruction."""
    verb, rest = text.split(" ", 1)
    cut = {"make": rest.rpartition(" "), "add": ("", "", rest), "remove": (rest, "", "")}
    meant, _, become = cut.get(verb) or rest.partition(" into " if verb == "turn" else " to ")
    return [1 + _VERBS.index(verb), *_labels(meant.split()), *_labels(become.split())]


def _labels(words: list[str]) -> list[int]:
    """Which word of each sort is among these; a place is what follows the last `the`."""
    place = " ".join(words[-words[::-1].index("the") :]) if "the" in words else ""
    found = [next((1 + index for index, one in enumerate(sort) if one in words), 0) for sort in _SORTS[:3]]
    return [*found, 1 + PLACES.index(place) if place in PLACES else 0]


def words_part(
    read: Callable[[Tensor, Tensor], Tensor], text: Any, width: int, tokenizer: Tokenizer, size: int
) -> Part:
    """Trains a text encoder to tell, at each of a prompt's last tokens, what is in one cell, and at the last one what
    the background is, or what an instruction says. `read`: ids, mask → [B, tokens, width], what the denoiser takes."""
    classes = {"cells": tuple(1 + len(one) for one in _SORTS[:3]), "ground": (1 + len(GROUNDS),), "asked": _INSTRUCTION}
    heads = nn.ModuleDict({name: nn.Linear(width, sum(widths)) for name, widths in classes.items()})

    def loss(batch: Words, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = read(batch.ids, batch.mask)
        last = batch.mask.sum(1, keepdim=True) - len(PLACES) + torch.arange(len(PLACES), device=rows.device)
        rows = rows.gather(1, last[..., None].expand(-1, -1, width))
        end = rows[:, -1:]
        each = {
            "cells": (rows, batch.cells),
            "ground": (end, batch.ground[:, None]),
            "asked": (end, batch.asked[:, None]),
        }
        losses, values = [], {}
        for name, (given, wanted) in each.items():
            logits = heads[name](given).float().split(classes[name], -1)
            losses += [
                functional.cross_entropy(one.flatten(0, 1), wanted[..., at].flatten()) for at, one in enumerate(logits)
            ]
            right = torch.stack([one.argmax(-1) for one in logits], -1).eq(wanted) | (wanted == _IGNORED)
            known = wanted[:, 0, 0] != _IGNORED
            values[f"{name} right"] = (right.flatten(1).all(1) & known).sum() / known.sum()
        return torch.stack(losses).sum(), values

    [matrices, _] = inside(text.model.layers)
    batch = Worded(tokenizer, size)
    return Part("words", [text], batch, loss, own=heads, rate=2e-3, matrices=matrices, matrix_rate=0.01)
