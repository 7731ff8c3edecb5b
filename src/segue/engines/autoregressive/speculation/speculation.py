"""The engine's interface to speculation: drafts before a step, counters and feedback to the drafter after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from segue.engines.autoregressive.schedule.decision import Limits, ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.drafter import Computed, Drafter, Wanted
from segue.engines.autoregressive.speculation.worth import Costs, Gate
from segue.parallel.ranks import ALONE, Ranks

NO_SPECULATION = {
    "spec_draft_tokens_total": 0.0,
    "spec_accepted_tokens_total": 0.0,
    "spec_switched_off_total": 0.0,
    "spec_active": 0.0,
}
"""Stats of an engine without speculation."""

_log = logging.getLogger(__name__)


class Speculation:
    """Guards a drafter: checks its ids, ends speculation on an exception, and skips requests that it slows down."""

    def __init__(
        self,
        drafter: Drafter | None,
        tokens: int,
        *,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafter`: None on all ranks but rank 0. `tokens`: most drafts per sequence and step. `adaptive`: switch off
        per request if it does not pay off."""
        self.tokens = tokens
        self._drafter = drafter
        self._adaptive = adaptive
        self._clock = clock
        self._costs = Costs()
        self._gates: dict[str, Gate] = {}
        self._batch = 1
        self._drafting = 0.0  # seconds that the drafter took since the last step
        self._served = 0  # number of sequences it served in that time
        self._drafted = 0
        self._accepted = 0
        self._switched_off = 0

    def propose(self, sequences: Iterable[Sequence], limits: Limits, vocab_size: int, ranks: Ranks = ALONE) -> None:
        """Give drafts to the running sequences that will decode in the next step and may speculate. What they are
        depends on measured costs, too: all ranks take rank 0's."""
        drafts = ranks.same(lambda: self._drafts(sequences, limits, vocab_size), dict[str, list[int]])
        if drafts:
            for sequence in sequences:
                if sequence.scheduled.key in drafts:
                    sequence.propose(drafts[sequence.scheduled.key])

    def _drafts(self, sequences: Iterable[Sequence], limits: Limits, vocab_size: int) -> dict[str, list[int]]:
        """Drafts by sequence key."""
        decoding = [sequence for sequence in sequences if sequence.scheduled.running and sequence.scheduled.runnable]
        room = limits.max_tokens - len(decoding)
        candidates = [sequence for sequence in decoding if self._wants(sequence)]
        if room <= 0 or not candidates or self._drafter is None:
            return {}
        drafts: dict[str, list[int]] = {}
        wanted = [_wanted(sequence, min(self.tokens, room)) for sequence in candidates]
        with self._contained():
            proposals = self._drafter.propose(wanted)
            for entry, proposed in zip(wanted, proposals, strict=True):
                drafts[entry.key] = _checked(proposed, entry.most, vocab_size)
            self._served = max(self._served, len(candidates))
        return drafts

    def _wants(self, sequence: Sequence) -> bool:
        scheduled = sequence.scheduled
        if not may_speculate(sequence) or sequence.drafts or sequence.wary or sequence.forced is not None:
            return False
        if not sequence.generated or scheduled.width > 1:
            return False  # its next tokens may be drawn by forks
        if (
            scheduled.ready != scheduled.length
            or scheduled.computed != scheduled.length - 1
            or sequence.most - sequence.generated < 2
        ):
            return False
        gate = self._gates.setdefault(scheduled.key, Gate())
        return gate.open or not self._adaptive

    def verified(self, sequence: Sequence, drafts: int, accepted: int, tokens: int) -> None:
        """Record a step that gave the sequence `tokens` and accepted `accepted` of `drafts` (some of them without use,
        if an earlier one ends the output)."""
        accepted = min(accepted, tokens)
        self._drafted += drafts
        self._accepted += accepted
        gate = self._gates.get(sequence.scheduled.key)
        if gate is not None and drafts:
            gate.verified(drafts, accepted, self._costs, self._batch)
            self._switched_off += self._adaptive and not gate.open
        elif gate is not None:
            gate.rested(tokens)

    def learn(
        self,
        runs: Mapping[Sequence, ScheduledTokens],
        alive: Container[Sequence],
        hidden: torch.Tensor,
        positions: torch.Tensor,
        seconds: float,
    ) -> None:
        """Pass a step's results for sequences still `alive` to the drafter, and record the step's cost.

        `hidden` [tokens, hidden] and `positions` [tokens] of the flat batch; `seconds` without drafting.
        """
        if self._drafter is not None:
            with self._contained():
                rows = self._drafter.rows(hidden)
                if rows is not None:
                    computed = list(_computed(runs, alive, rows, positions))
                    self._drafter.observe(computed)
                    self._served = max(self._served, len(computed))
        # steps with prefill do not measure decoding
        if all(run.tokens - run.drafts == 1 for run in runs.values()):
            self._batch = len(runs)
            self._costs.step(len(hidden), seconds)
            if self._served:
                self._costs.drafting(self._served, self._drafting)
        self._drafting, self._served = 0.0, 0

    def forget(self, key: str) -> None:
        """The sequence was removed."""
        self._gates.pop(key, None)
        if self._drafter is not None:
            with self._contained():
                self._drafter.forget(key)

    def stats(self) -> dict[str, float]:
        """`spec_active`: 0 after the drafter has failed. The same names as `NO_SPECULATION`."""
        return {
            "spec_draft_tokens_total": self._drafted,
            "spec_accepted_tokens_total": self._accepted,
            "spec_switched_off_total": self._switched_off,
            "spec_active": float(self._drafter is not None),
        }

    def audit(self) -> None:
        """Check the drafter's state."""
        if self._drafter is not None:
            self._drafter.audit()

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Measure the drafter's time. Any exception in it ends speculation, and nothing else."""
        start = self._clock()
        try:
            yield
        except Exception as error:
            _log.error("speculation is off: the drafter failed: %s: %s", type(error).__name__, error, exc_info=error)
            self._drafter = None
        self._drafting += self._clock() - start


def may_speculate(sequence: Sequence) -> bool:
    """Whether the sequence can use drafts at all."""
    sampling = sequence.request.sampling
    return (
        not sequence.kept
        and sampling.speculate is not False
        and not sequence.model.conditioned
        and (sampling.beam_width or 1) == 1
    )


def _wanted(sequence: Sequence, most: int) -> Wanted:
    assert sequence.sampler is not None
    return Wanted(
        key=sequence.scheduled.key,
        ids=sequence.ids,
        most=min(most, sequence.most - sequence.generated - 1),
        generated=sequence.generated,
        sampler=sequence.sampler,
        plain=sequence.input.plain,
    )


def _computed(
    runs: Mapping[Sequence, ScheduledTokens], alive: Container[Sequence], rows: torch.Tensor, positions: torch.Tensor
) -> Iterator[Computed]:
    begin = 0
    for sequence, run in runs.items():
        scheduled = sequence.scheduled
        # ids do not represent such prompts, so they cannot be embedded again: only their last row is used
        start = run.start if sequence.input.plain else max(run.start, sequence.prompt_length - 1)
        if sequence in alive and may_speculate(sequence) and start < scheduled.computed:
            part = slice(begin + start - run.start, begin + scheduled.computed - run.start)
            yield Computed(scheduled.key, sequence.ids, start, rows[part], positions[part])
        begin += run.tokens


def _checked(drafts: list[int], most: int, vocab_size: int) -> list[int]:
    """Drafts up to the first invalid token id."""
    for place, token in enumerate(drafts[:most]):
        if not 0 <= token < vocab_size:
            return drafts[:place]
    return drafts[:most]
