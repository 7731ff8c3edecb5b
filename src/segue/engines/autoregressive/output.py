"""What the engine returns for a sequence after a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from segue.engines.autoregressive.contract import Prompt
from segue.engines.contract import StageOutput
from segue.messages.deltas import TokenLogprobs


@dataclass(slots=True)
class CapturedRows:
    """A slice of a per-token stream: `data[i]` belongs to position `start + i` of the request's sequence."""

    start: int
    data: torch.Tensor
    """[n, width]; on the engine's device."""


@dataclass(slots=True)
class TokenOutput(StageOutput):
    """The new tokens of one output of a request."""

    token_ids: list[int] = field(default_factory=list)
    """Newly generated ids, including the end token."""
    first_index: int = 0
    """Number of ids generated before these."""
    codes: list[list[int]] = field(default_factory=list)
    """[n][groups] Parallel to `token_ids`: the whole row of each, if the stage model yields rows of codes."""
    text: str = ""
    """New text, if the stage makes text for the client; held back while it may be part of a stop string."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Parallel to `token_ids`, if the request asks for them; ids of an earlier attempt, which come first, have none."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """With the request's first token, if requested."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """With the request's first token, if requested."""
    captured: CapturedRows | None = None
    """Rows that the stage model captured for the tokens computed in this step (or found in the prefix cache)."""
    prompt: Prompt | None = None
    """In the first output with captured rows, for transfers."""
    stop_reason: int | str | None = None
    """With `finish_reason`: the request's stop token or stop string that ended it; None for the family's end token."""
    cumulative_logprob: float | None = None
    """When finished: sum over the tokens of the output, if the engine computed it."""
    cached_tokens: int = 0
    """Those of `prompt_tokens` that the prefix cache had."""
