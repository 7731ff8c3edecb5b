"""Prompts of pipelines with several text encoders: token ids, and the denoiser's conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from segue.models.shared.diffusion.library import PreTrainedTokenizerBase

CLIP_LENGTH = 77
"""CLIP's prompt length in tokens, if the tokenizer does not state it."""


class Condition(NamedTuple):
    """An encoded prompt."""

    text: torch.Tensor
    """[tokens, features]: the tokens that the image attends to."""
    pooled: torch.Tensor
    """[features]: pooled over the prompt."""


def padded_ids(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> list[int]:
    """Exactly `length` token ids: truncated, or filled with the tokenizer's padding."""
    return list(tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> int:
    """The number of token ids of a text, at most `length`, without padding."""
    return len(tokenizer(text, max_length=length, truncation=True).input_ids)


def clip_length(tokenizer: PreTrainedTokenizerBase) -> int:
    """The length to which prompts for CLIP are padded."""
    longest = tokenizer.model_max_length
    return longest if longest < 100_000 else CLIP_LENGTH  # the library uses a huge number for "not stated"


def stacked(conditions: Sequence[Condition]) -> Condition:
    """Stack conditions of equal length: [rows, tokens, features] and [rows, features]."""
    return Condition(
        torch.stack([condition.text for condition in conditions]),
        torch.stack([condition.pooled for condition in conditions]),
    )
