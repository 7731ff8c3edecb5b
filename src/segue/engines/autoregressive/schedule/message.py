"""A `Decision` as a value that other ranks can apply: sequences are named by their keys instead of being held.

Optional reading: a replica of one rank makes none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from segue.engines.autoregressive.schedule.decision import Decision, ScheduledSequence, ScheduledTokens


class RunMessage(msgspec.Struct, array_like=True):
    """A `ScheduledTokens`; the fields have the same names."""

    key: str
    start: int
    tokens: int
    allocate: int
    hit: tuple[tuple[int, ...], ...]
    copy: bool
    drafts: int
    wanted: int
    keep: tuple[int, ...]


class DecisionMessage(msgspec.Struct, array_like=True):
    """A `Decision`."""

    preempt: list[str]
    runs: list[RunMessage]

    @classmethod
    def of(cls, decision: Decision) -> DecisionMessage:
        """Name the sequences of a decision."""
        runs = [
            RunMessage(
                run.sequence.key,
                run.start,
                run.tokens,
                run.allocate,
                run.hit,
                run.copy,
                run.drafts,
                run.wanted,
                run.keep,
            )
            for run in decision.runs
        ]
        return cls([sequence.key for sequence in decision.preempt], runs)

    def decision(self, sequence: Callable[[str], ScheduledSequence]) -> Decision:
        """The decision over this rank's sequences. `sequence`: finds one by its key."""
        runs = tuple(
            ScheduledTokens(
                sequence(run.key),
                run.start,
                run.tokens,
                run.allocate,
                run.hit,
                run.copy,
                run.drafts,
                run.wanted,
                run.keep,
            )
            for run in self.runs
        )
        return Decision(tuple(map(sequence, self.preempt)), runs)
