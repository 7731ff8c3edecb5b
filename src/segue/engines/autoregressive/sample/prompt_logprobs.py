"""Log-probabilities of prompt tokens, from the hidden states that a step computed.

Optional reading: only for requests that ask for the probabilities of their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveModel
from segue.engines.autoregressive.sample.logprobs import Likelihoods, PromptLogprobs
from segue.engines.autoregressive.schedule.decision import ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.kernels.staging import upload

SLICE_BYTES = 64 << 20
"""Logits of prompt rows are computed in slices of about this many bytes (float32), whatever the prompt's length."""


def gather_prompt_logprobs(
    model: AutoregressiveModel, runs: Mapping[Sequence, ScheduledTokens], hidden: torch.Tensor
) -> None:
    """Add this step's part of the requested prompt log-probabilities. `hidden` [tokens, H]: final states of the batch.

    The state at position p gives the log-probability of token p + 1. Values that are known already (a preempted prefill
    is computed again) are left unchanged.
    """
    rows: list[int] = []
    where: list[tuple[PromptLogprobs, int]] = []
    begin = 0
    for sequence, run in runs.items():
        asked = sequence.prompt_logprobs
        if asked is not None:
            first = max(run.start, len(asked.found) - 1)
            for position in range(first, min(run.stop, sequence.prompt_length - 1)):
                rows.append(begin + position - run.start)
                where.append((asked, sequence.ids[position + 1]))
        begin += run.tokens
    if not rows:
        return
    size = max(1, SLICE_BYTES // (4 * model.vocab_size))
    for start in range(0, len(rows), size):
        part = where[start : start + size]
        states = hidden[upload(np.array(rows[start : start + size]), hidden.device)]
        likely = Likelihoods(model.logits(states), [asked.wanted for asked, _ in part])
        for (asked, _), one in zip(part, likely.of([token for _, token in part], model.vocabulary), strict=True):
            asked.found.append(one)
