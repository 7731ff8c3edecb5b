"""A prompt as the model reads it: passages of text and images between their marks. No torch here.

Each text is a passage `<|im_start|> … <|im_end|>` with one position per token. An image is a block of tokens between
two marks; all of them, the marks included, have one position and attend to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

BEGIN, END = "<|im_start|>", "<|im_end|>"
BEFORE, BEHIND, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
MARKS = (BEGIN, END, BEFORE, BEHIND, PAD)


class Marks(NamedTuple):
    """The ids of `MARKS`."""

    begin: int
    end: int
    before: int
    behind: int
    pad: int


class Block(NamedTuple):
    """An image in a prompt."""

    start: int
    stop: int
    """Its tokens, its marks included."""
    image: int
    """Its number among the request's."""
    latent: bool = False
    """Its tokens are latents of the VAE, not patches of the vision tower."""


@dataclass(slots=True)
class Passages:
    """The passages of a prompt so far."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    next: int = 0
    """The position of what comes next."""

    def text(self, ids: list[int]) -> None:
        """Append tokens of text."""
        self.ids += ids
        self.positions += range(self.next, self.next + len(ids))
        self.next += len(ids)

    def image(self, marks: Marks, tokens: int, image: int, *, latent: bool = False) -> None:
        """Append an image of this many tokens."""
        start = len(self.ids)
        self.ids += [marks.before, *([marks.pad] * tokens), marks.behind]
        self.positions += [self.next] * (tokens + 2)
        self.blocks.append(Block(start, len(self.ids), image, latent))
        self.next += 1
