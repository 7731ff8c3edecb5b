"""Prompts of pipelines with several text encoders: as token ids, and as what a denoiser gets of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from segue.models.diffusion.library import PreTrainedTokenizerBase

CLIP_LENGTH = 77
"""Tokens, where the tokenizer says nothing."""


class Condition(NamedTuple):
    """A prompt, encoded."""

    text: torch.Tensor
    """[tokens, features]: what the picture attends to."""
    pooled: torch.Tensor
    """[features]: the whole of it."""


def padded_ids(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> list[int]:
    """Exactly so many token ids: what is longer is cut, what is shorter filled with the tokenizer's padding."""
    return list(tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> int:
    """How many ids a text has, at most `length`; padding is not counted."""
    return len(tokenizer(text, max_length=length, truncation=True).input_ids)


def clip_length(tokenizer: PreTrainedTokenizerBase) -> int:
    """To which the prompts for a CLIP are padded."""
    longest = tokenizer.model_max_length
    return longest if longest < 100_000 else CLIP_LENGTH  # the library has a huge number for "not said"


def stacked(conditions: Sequence[Condition]) -> Condition:
    """Of prompts of equal length: [rows, tokens, features] and [rows, features]."""
    return Condition(
        torch.stack([condition.text for condition in conditions]),
        torch.stack([condition.pooled for condition in conditions]),
    )
