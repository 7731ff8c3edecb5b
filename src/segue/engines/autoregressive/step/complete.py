"""Completes a step: turns the model's results for a flat batch into the outputs of the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from segue.engines.autoregressive.branches.beam_group import BeamGroup
from segue.engines.autoregressive.branches.branches import Forks
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.sample.draw import StepResult
from segue.engines.autoregressive.schedule.decision import ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.autoregressive.step.active import ActiveSequences
from segue.engines.autoregressive.step.dispatch import StepInFlight
from segue.engines.autoregressive.step.outputs import accept, announce, give_rows, nothing_left
from segue.engines.autoregressive.step.resources import Resources
from segue.kernels.attention.paged_step import HybridStep, PagedStep
from segue.messages.errors import SegueError, StageFailed
from segue.messages.units import TurnEnd


class Completion:
    """Gives each sequence its tokens and rows, and removes the sequences that have ended."""

    def __init__(self, resources: Resources, active: ActiveSequences, speculation: Speculation | None) -> None:
        self._store = resources.store
        self._scheduler = resources.scheduler
        self._share_size = resources.share_size
        self._active = active
        self._speculation = speculation
        self.generated_tokens = 0
        """Total since the start."""
        self.prefill_tokens = 0
        """Total since the start."""

    def failed(self, sequences: Iterable[Sequence], error: StageFailed) -> list[TokenOutput]:
        """Fail the requests of a batch for which the model returned nothing."""
        ids = dict.fromkeys(sequence.request.request_id for sequence in sequences if sequence in self._active)
        return [self._active.fail(request_id, error, scrub=True) for request_id in ids]

    def outputs(self, step: StepInFlight, results: Mapping[Sequence, StepResult]) -> list[TokenOutput]:
        """Outputs of a step in the order of the flat batch, then those of beam searches that have ended."""
        outputs: list[TokenOutput] = []
        begin = end = 0
        for sequence, run in step.runs.items():
            begin, end = end, end + run.tokens
            if sequence in self._active:
                outputs += self._given(sequence, step, results, slice(begin, end))
            elif not results[sequence].finite:
                # its request failed in this step or ended before it completed: its blocks have no new owner yet
                self._active.scrub(run.sequence.blocks)
        return outputs + self._advance(step.searches)

    def _given(
        self, sequence: Sequence, step: StepInFlight, results: Mapping[Sequence, StepResult], rows: slice
    ) -> list[TokenOutput]:
        """Outputs of a sequence and of the forks that start from its computed prompt. `rows`: its rows of the flat
        batch."""
        request_id, run = sequence.request.request_id, step.runs[sequence]
        forks = _new_forks(sequence)
        given = {branch: results.get(branch, StepResult()) for branch in (sequence, *forks)}
        if _stale(sequence, run):
            given = {sequence: StepResult(results[sequence].finite)}
        if run.drafts and not all(result.finite and result.finite_logits for result in given.values()):
            self._undo(sequence, run, step.attention, rows)
            return []
        if not all(result.finite and result.finite_logits for result in given.values()):
            error = StageFailed("the model gave NaN or infinity for this request", stage=sequence.request.stage)
            return [self._active.fail(request_id, error, scrub=True)]
        if any(result.stuck for result in given.values()):
            return [self._active.fail(request_id, nothing_left(sequence))]
        if step.captured is None and self._store.rows is not None:
            sequence.shareable = False  # a block without captured rows is useless to sequences that want rows
        self.prefill_tokens += max(0, min(run.stop, sequence.prompt_length) - run.start)
        if forks:  # they share the computed blocks
            self._scheduler.advance(sequence.scheduled, run.stop, publish=sequence.shareable)
        for fork in forks:
            self._active.fork(sequence, fork)
        captured = None if step.captured is None else step.captured[rows]
        outputs: list[TokenOutput] = []
        for branch, result in given.items():
            output, new = self._output(branch, run, result, captured, forked=bool(forks))
            if output.error is not None:
                return [*outputs, self._active.fail(output.request_id, output.error)]
            if branch.over and branch.scheduled.computed >= branch.scheduled.ready:
                new = output.finished = True
                output.finish_reason, output.stop_reason = branch.last_end
            if new:
                outputs += branch.branches.give(output) if isinstance(branch.branches, Forks) else [output]
            if output.finished:
                self.end(branch, output)
            elif output.turn_ended:
                outputs += self._end_turn(branch, output)
        return outputs

    def end(self, sequence: Sequence, output: TokenOutput) -> None:
        """Remove a sequence with its last output, or let it hold its blocks for requests that go on from it."""
        if sequence.keeps and sequence.scheduled.running and self._share_size:
            end = TurnEnd(sequence.emitted, output.finish_reason, output.stop_reason)
            self._active.keep(sequence, end, self._share_size)
        else:
            self._active.remove(sequence)

    def _end_turn(self, sequence: Sequence, output: TokenOutput) -> list[TokenOutput]:
        """Let a sequence hold after a turn, or go on with the next piece of its input."""
        try:
            sequence.end_turn(TurnEnd(sequence.emitted, output.finish_reason, output.stop_reason))
        except SegueError as error:
            return [self._active.fail(output.request_id, error)]
        sequence.refresh(self._share_size)
        return []

    def _output(
        self,
        sequence: Sequence,
        run: ScheduledTokens,
        result: StepResult,
        captured: torch.Tensor | None,
        *,
        forked: bool,
    ) -> tuple[TokenOutput, bool]:
        """(output of a sequence, whether it has content). `captured`: [tokens of the run, width]."""
        output = TokenOutput(sequence.request.request_id, index=sequence.index)
        new = announce(sequence, run, output)
        if result.tokens:
            if sequence.index == 0 and sequence.generated == 0 and not sequence.turns:
                sequence.tell_prompt(output)
            known = sequence.generated
            accept(sequence, result, self._share_size, output)
            accepted = sequence.generated - known
            self.generated_tokens += accepted
            if self._speculation is not None:
                self._speculation.verified(sequence, run.drafts, result.accepted, accepted)
            new = True
        sequence.emitted += len(output.token_ids)
        if output.error is not None:
            return output, new
        if not forked:
            # the newest token is never computed: rejected drafts, or tokens after an end, follow it
            computed = sequence.scheduled.length - 1 if result.tokens else run.stop
            self._scheduler.advance(sequence.scheduled, computed, publish=sequence.shareable)
        if captured is not None and sequence.wants_rows:
            rows = captured[: sequence.scheduled.computed - run.start]
            new |= give_rows(sequence, run, rows, self._store, output)
        return output, new

    def _undo(self, sequence: Sequence, run: ScheduledTokens, attention: PagedStep | HybridStep, rows: slice) -> None:
        """Undo a run with drafts that gave NaN: a wrong draft may cause it, and even masked it spoils earlier tokens.
        The next step recomputes them without drafts. `rows`: of the flat batch."""
        for group in attention.groups:
            self._store.scrub_slots(group.slots[rows])
        if sequence.scheduled.slot is None:
            self._scheduler.advance(sequence.scheduled, run.start, publish=False)
        else:  # its state may hold NaN, too
            self._scheduler.restart(sequence.scheduled)
        sequence.propose([])
        sequence.wary = True

    def _advance(self, searches: list[BeamGroup]) -> list[TokenOutput]:
        """Form the beams of the next step, or return the outputs of searches that have ended."""
        outputs: list[TokenOutput] = []
        for search in searches:
            request_id = search.root.request.request_id
            if not self._active.of(request_id):
                continue  # it has failed in this step
            try:
                ended = search.advance(self._active, self._share_size)
            except SegueError as error:
                outputs.append(self._active.fail(request_id, error, scrub=True))
            else:
                outputs += ended
                self.generated_tokens += sum(len(output.token_ids) for output in ended)
        return outputs


def _new_forks(sequence: Sequence) -> list[Sequence]:
    """The forks of a sequence that has computed its prompt in this step."""
    forks: list[Sequence] = []
    if isinstance(sequence.branches, Forks):
        forks, sequence.branches.new = sequence.branches.new, []
    return forks


def _stale(sequence: Sequence, run: ScheduledTokens) -> bool:
    """Whether a turn ended after this run was dispatched: what it draws is not wanted."""
    return bool(sequence.turns) and (sequence.holds or run.stop - run.drafts < sequence.prompt_length)
