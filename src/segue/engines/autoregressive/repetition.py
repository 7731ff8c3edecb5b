"""Outputs that go round in circles: `repetition_detection`, as vLLM has it."""

from __future__ import annotations

from collections.abc import Sequence

from segue.messages.sampling import RepetitionDetection

REASON = "repetition"
"""`finish_reason` of such an output; vLLM's."""
STOP_REASON = "repetition_detected"
"""Its `stop_reason`; vLLM's."""


def looked_at(asked: RepetitionDetection) -> int:
    """How many of the last tokens decide."""
    return asked.max_pattern_size * asked.min_count


def repeats(tokens: Sequence[int], asked: RepetitionDetection) -> bool:
    """Whether `tokens` end with some pattern, of the sizes asked for, so many times in a row."""
    end = len(tokens)
    for size in range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1):
        begin = end - size * asked.min_count
        if begin < 0:
            return False
        # each token is that of one pattern before
        if all(tokens[place] == tokens[place - size] for place in range(end - 1, begin + size - 1, -1)):
            return True
    return False
