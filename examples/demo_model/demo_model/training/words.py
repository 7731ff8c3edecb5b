"""Teach the drawing pipeline's text encoder to read: from captions what is to be in each cell of a picture, from
instructions what is to be done with what. It learns that from words alone, thousands of times faster than from pictures
of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from demo_model.data import IGNORED
from demo_model.data.scenes import GROUNDS, PLACES
from demo_model.data.texts import SORTS, VERBS, Worded, Words
from demo_model.training.muon import inside
from demo_model.training.steps import Part

_INSTRUCTION = tuple(1 + len(one) for one in (VERBS, *SORTS, *SORTS))


def words_part(
    read: Callable[[Tensor, Tensor], Tensor], text: Any, width: int, tokenizer: Tokenizer, size: int
) -> Part:
    """Trains a text encoder to tell, at each of a prompt's last tokens, what is in one cell, and at the last one what
    the background is, or what an instruction says. `read`: ids, mask → [B, tokens, width], what the denoiser takes."""
    classes = {"cells": tuple(1 + len(one) for one in SORTS[:3]), "ground": (1 + len(GROUNDS),), "asked": _INSTRUCTION}
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
            right = torch.stack([one.argmax(-1) for one in logits], -1).eq(wanted) | (wanted == IGNORED)
            known = wanted[:, 0, 0] != IGNORED
            values[f"{name} right"] = (right.flatten(1).all(1) & known).sum() / known.sum()
        return torch.stack(losses).sum(), values

    [matrices, _] = inside(text.model.layers)
    batch = Worded(tokenizer, size)
    return Part("words", [text], batch, loss, own=heads, rate=2e-3, matrices=matrices, matrix_rate=0.01)
