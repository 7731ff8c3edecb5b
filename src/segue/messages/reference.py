"""Questions to the model library, whose answers `segue verify` compares with Segue's, and the library's answers.

Optional reading: only for `segue verify`.
"""

from __future__ import annotations

import msgspec

from segue.messages.request import Request


class Question(msgspec.Struct):
    """One request, and the tokens that Segue generated for it."""

    index: int
    request: Request
    token_ids: dict[str, list[int]] = {}
    """By autoregressive stage, end token included."""


class Followed(msgspec.Struct):
    """The library's choice at each position of a reply, given the reply's preceding tokens."""

    stage: str
    best: list[int]
    """The library's own greedy choices: one more than the reply's tokens if the library would have gone on, fewer if it
    ends earlier."""
    margins: list[float]
    """How much likelier that choice is than the reply's token, as a difference of log-probabilities: 0 if they are the
    same token, infinite if the library rules the token out, NaN if its scores are NaN."""
    logprobs: list[float] | None = None
    """Log-probabilities of the reply's tokens, before penalties; None if the library does not give them."""


class Pixels(msgspec.Struct):
    """An image or a video."""

    shape: tuple[int, ...]
    """(height, width, 3) or (frames, height, width, 3)."""
    data: bytes
    """uint8."""


class LibraryAnswer(msgspec.Struct, tag=True, kw_only=True):
    """The library's answer to a question; fields for outputs that the model does not make are empty."""

    index: int
    seconds: float = 0.0
    prompt_token_ids: list[int] | None = None
    """None: the library does not report them."""
    followed: list[Followed] = []
    samples: bytes | None = None
    """float32 little-endian mono."""
    pixels: list[Pixels] = []
    vector: list[float] | None = None
    """An embedding, a score or the scores of classes."""
    refused: str | None = None
    """Why the library's own call does not accept this request."""
    error: str | None = None
    """The error that the library raised."""
