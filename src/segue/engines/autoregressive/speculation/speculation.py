"""Speculation as the engine sees it: drafts before a step, counting and telling after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import torch

from segue.engines.autoregressive.inputs import Scheduled
from segue.engines.autoregressive.jobs import Limits
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.drafter import Computed, Drafter, Wanted
from segue.engines.autoregressive.speculation.worth import Costs, Gate

NO_SPECULATION = {
    "spec_draft_tokens_total": 0.0,
    "spec_accepted_tokens_total": 0.0,
    "spec_switched_off_total": 0.0,
    "spec_active": 0.0,
}
"""What an engine without it reports."""

_log = logging.getLogger(__name__)


class Speculation:
    """A drafter with what keeps it in bounds: ids are checked, an exception ends it, requests it slows are left out."""

    def __init__(
        self,
        drafter: Drafter,
        tokens: int,
        *,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tokens`: most drafts per sequence and step. `adaptive`: switch off per request where it does not pay."""
        self.tokens = tokens
        self._drafter: Drafter | None = drafter
        self._adaptive = adaptive
        self._clock = clock
        self._costs = Costs()
        self._gates: dict[str, Gate] = {}
        self._batch = 1
        self._drafting = 0.0  # seconds the drafter took since the last step
        self._served = 0  # for so many sequences
        self._drafted = 0
        self._accepted = 0
        self._switched_off = 0

    def propose(self, sequences: Iterable[Sequence], limits: Limits, vocab_size: int) -> None:
        """Give drafts to the running sequences that are about to decode and may speculate."""
        decoding = [sequence for sequence in sequences if sequence.job.running and sequence.job.runnable]
        room = limits.max_tokens - len(decoding)
        candidates = [sequence for sequence in decoding if self._wants(sequence)]
        if room <= 0 or not candidates or self._drafter is None:
            return
        wanted = [_wanted(sequence, min(self.tokens, room)) for sequence in candidates]
        with self._contained():
            proposals = self._drafter.propose(wanted)
            for sequence, entry, drafts in zip(candidates, wanted, proposals, strict=True):
                sequence.propose(_checked(drafts, entry.most, vocab_size))
            self._served = max(self._served, len(candidates))

    def _wants(self, sequence: Sequence) -> bool:
        job = sequence.job
        if not may_speculate(sequence) or sequence.drafts or sequence.wary or sequence.forced is not None:
            return False
        if not sequence.generated or job.width > 1:
            return False  # what comes next may be forks of it
        if job.ready != job.length or job.computed != job.length - 1 or sequence.most - sequence.generated < 2:
            return False
        gate = self._gates.setdefault(job.key, Gate())
        return gate.open or not self._adaptive

    def verified(self, sequence: Sequence, drafts: int, accepted: int, tokens: int) -> None:
        """A step gave the sequence `tokens`, and accepted so many of `drafts` (some of them in vain, where one ends the
        output)."""
        accepted = min(accepted, tokens)
        self._drafted += drafts
        self._accepted += accepted
        gate = self._gates.get(sequence.job.key)
        if gate is not None and drafts:
            gate.verified(drafts, accepted, self._costs, self._batch)
            self._switched_off += self._adaptive and not gate.open
        elif gate is not None:
            gate.rested(tokens)

    def learn(
        self,
        scheduled: Seq[Scheduled],
        alive: Container[str],
        hidden: torch.Tensor,
        positions: torch.Tensor,
        seconds: float,
    ) -> None:
        """Tell the drafter what a step computed of the sequences that are `alive` still, and note what it cost.

        `hidden` [tokens, hidden] and `positions` [tokens] of the flat batch; `seconds` without drafting.
        """
        if self._drafter is not None:
            with self._contained():
                rows = self._drafter.rows(hidden)
                if rows is not None:
                    computed = list(_computed(scheduled, alive, rows, positions))
                    self._drafter.observe(computed)
                    self._served = max(self._served, len(computed))
        # steps with prefill say nothing of decoding
        if all(run.tokens - run.drafts == 1 for _, run in scheduled):
            self._batch = len(scheduled)
            self._costs.step(len(hidden), seconds)
            if self._served:
                self._costs.drafting(self._served, self._drafting)
        self._drafting, self._served = 0.0, 0

    def forget(self, key: str) -> None:
        """The sequence is gone."""
        self._gates.pop(key, None)
        if self._drafter is not None:
            with self._contained():
                self._drafter.forget(key)

    def stats(self) -> dict[str, float]:
        """`spec_active`: 0 once the drafter has failed. The same names as `NO_SPECULATION`."""
        return {
            "spec_draft_tokens_total": self._drafted,
            "spec_accepted_tokens_total": self._accepted,
            "spec_switched_off_total": self._switched_off,
            "spec_active": float(self._drafter is not None),
        }

    def audit(self) -> None:
        """Check the drafter's books."""
        if self._drafter is not None:
            self._drafter.audit()

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Time of the drafter. Whatever it raises is the end of speculation, and of nothing else."""
        start = self._clock()
        try:
            yield
        except Exception as error:
            _log.error("speculation is off: the drafter failed: %s: %s", type(error).__name__, error, exc_info=error)
            self._drafter = None
        self._drafting += self._clock() - start


def may_speculate(sequence: Sequence) -> bool:
    """Whether drafts are of use to it at all."""
    sampling = sequence.request.sampling
    return sampling.speculate is not False and not sequence.adapter.conditioned and (sampling.beam_width or 1) == 1


def _wanted(sequence: Sequence, most: int) -> Wanted:
    assert sequence.sampler is not None
    assert sequence.prompt is not None
    return Wanted(
        key=sequence.job.key,
        ids=sequence.ids,
        most=min(most, sequence.most - sequence.generated - 1),
        generated=sequence.generated,
        sampler=sequence.sampler,
        plain=sequence.prompt.embeds is None,
    )


def _computed(
    scheduled: Seq[Scheduled], alive: Container[str], rows: torch.Tensor, positions: torch.Tensor
) -> Iterator[Computed]:
    begin = 0
    for sequence, run in scheduled:
        job, prompt = sequence.job, sequence.prompt
        assert prompt is not None
        # what ids do not say cannot be embedded again: such prompts are left out, but for their last row
        start = run.start if prompt.embeds is None else max(run.start, sequence.prompt_length - 1)
        if job.key in alive and may_speculate(sequence) and start < job.computed:
            part = slice(begin + start - run.start, begin + job.computed - run.start)
            yield Computed(job.key, sequence.ids, start, rows[part], positions[part])
        begin += run.tokens


def _checked(drafts: list[int], most: int, vocab_size: int) -> list[int]:
    """Drafts up to the first that is no token."""
    for place, token in enumerate(drafts[:most]):
        if not 0 <= token < vocab_size:
            return drafts[:place]
    return drafts[:most]
