"""How likely the tokens of prompts were, from the states that a step computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter
from segue.engines.autoregressive.inputs import Scheduled
from segue.engines.autoregressive.logprobs import Likelihoods, PromptLogprobs
from segue.kernels.staging import upload

SLICE_BYTES = 64 << 20
"""Logits of prompt rows are made in slices of about so many bytes (float32), whatever the prompt's length."""


def gather_prompt_logprobs(adapter: AutoregressiveAdapter, scheduled: Seq[Scheduled], hidden: torch.Tensor) -> None:
    """Add what this step says of the prompts that ask for it. `hidden` [tokens, H]: final states of the flat batch.

    The state at position p says how likely token p + 1 was. What is known from before (a preempted prefill is computed
    again) is left alone.
    """
    rows: list[int] = []
    where: list[tuple[PromptLogprobs, int]] = []
    begin = 0
    for sequence, run in scheduled:
        asked = sequence.prompt_logprobs
        if asked is not None:
            first = max(run.start, len(asked.found) - 1)
            for position in range(first, min(run.stop, sequence.prompt_length - 1)):
                rows.append(begin + position - run.start)
                where.append((asked, sequence.ids[position + 1]))
        begin += run.tokens
    if not rows:
        return
    size = max(1, SLICE_BYTES // (4 * adapter.vocab_size))
    for start in range(0, len(rows), size):
        part = where[start : start + size]
        states = hidden[upload(np.array(rows[start : start + size]), hidden.device)]
        likely = Likelihoods(adapter.logits(states), [asked.wanted for asked, _ in part])
        for (asked, _), one in zip(part, likely.of([token for _, token in part], adapter.vocabulary), strict=True):
            asked.found.append(one)
