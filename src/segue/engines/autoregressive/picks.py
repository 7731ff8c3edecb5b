"""From the logits of a step to the tokens of its sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from segue.engines.autoregressive.inputs import Scheduled
from segue.engines.autoregressive.sampler import sample
from segue.engines.autoregressive.sequence import Sequence
from segue.messages.deltas import TokenLogprobs


@dataclass(slots=True)
class Target:
    """A sequence that gets tokens in this step, and the rows of the flat batch whose logits decide them."""

    sequence: Sequence
    rows: range
    """One: that of its last token."""


@dataclass(slots=True)
class Pick:
    """What the logits of a target gave."""

    tokens: list[int] = field(default_factory=list)
    """New tokens, at least one where `finite`."""
    finite: bool = True
    """False where a logit was NaN or infinite: then there are no tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Beside `tokens`, where the request asks for them."""


def targets(scheduled: Seq[Scheduled]) -> list[Target]:
    """The sequences whose known tokens are all computed after this step."""
    found, end = [], 0
    for sequence, run in scheduled:
        end += run.tokens
        if run.stop == sequence.job.length:
            found.append(Target(sequence, range(end - 1, end)))
    return found


def pick(wanted: Seq[Target], logits: torch.Tensor) -> dict[str, Pick]:
    """By request. `logits` [rows of all targets, vocab] float32, which may be changed."""
    finite = torch.isfinite(logits.sum(dim=-1)).tolist()
    samplers = [target.sequence.sampler for target in wanted]
    drawn = sample(
        logits,
        [sampler for sampler in samplers if sampler is not None],
        [target.sequence.generated for target in wanted],
    )
    return {
        target.sequence.job.key: Pick([token] if fine else [], fine)
        for target, token, fine in zip(wanted, drawn, finite, strict=True)
    }
