"""The autoregressive engine: continuous batching over a paged KV cache. Read `step` first."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import torch

from segue.engines.autoregressive.branches import branches
from segue.engines.autoregressive.branches.beam_group import BeamGroup
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveModel, Fed, Then
from segue.engines.autoregressive.grammar.grammar import Grammars, form_field
from segue.engines.autoregressive.grammar.shared import SharedGrammars
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.sample.logprobs import check_logprobs
from segue.engines.autoregressive.schedule.decision import Decision, ScheduledSequence, ScheduledTokens
from segue.engines.autoregressive.schedule.message import DecisionMessage
from segue.engines.autoregressive.schedule.policies import rank
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.speculation import NO_SPECULATION, Speculation
from segue.engines.autoregressive.step.active import ActiveSequences
from segue.engines.autoregressive.step.complete import Completion
from segue.engines.autoregressive.step.dispatch import StepInFlight
from segue.engines.autoregressive.step.resources import allocate
from segue.engines.contract import Payload, StageRequest
from segue.kernels.device import end_where_lost
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.parallel.ranks import ALONE, Ranks


class Moment(msgspec.Struct, array_like=True):
    """What a step depends on besides its requests: all ranks take rank 0's."""

    now: float
    """`time.monotonic()` at its start."""
    compiled: list[tuple[str, bool]]
    """(key of a sequence whose grammar is compiled, whether that failed)."""


class AutoregressiveEngine:
    """Implements `segue.engines.contract.Engine` for a decoder behind an `AutoregressiveModel`."""

    def __init__(
        self,
        model: AutoregressiveModel,
        config: AutoregressiveConfig,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
        *,
        ahead: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks = ALONE,
    ) -> None:
        """Allocates the KV cache. Raises `ConfigError` for a model that cannot be served in flat batches.

        `grammars` wakes a waiting worker loop when a grammar is compiled; None: it wakes nothing. `ahead`: dispatch a
        step before the previous one completes, if possible; None: only on devices that run asynchronously. `clock`: for
        `hold_seconds`. `ranks`: those that run this engine together, with equal arguments.
        """
        resources = allocate(model, config, speculation, ranks)
        self.resources = resources
        """For inspection; only the engine changes it."""
        self._model = resources.model
        self._config = config
        self._scheduler = resources.scheduler
        self._dispatcher = resources.dispatcher
        self._speculation = speculation
        # drafts depend on the preceding tokens and on their states
        self._ahead = speculation is None and (model.device.type != "cpu" if ahead is None else ahead)
        self._in_flight: StepInFlight | None = None
        """The step that was dispatched and has not completed."""
        self._ranks = ranks
        own = grammars or Grammars.of(self._model)
        self._grammars: Grammars | SharedGrammars = own if ranks.alone else SharedGrammars(own, ranks)
        self._active = ActiveSequences(resources.scheduler, resources.pool, resources.store, speculation)
        self._completion = Completion(resources, self._active, speculation)
        self._between: list[TokenOutput] = []
        """Outputs of requests that ended between steps (by a chunk): emitted by the next step."""
        self._serial = 0
        self._stalled = False  # the last decision was empty, and nothing has changed since
        self._batch = 0
        self._clock = clock

    # --- the contract ------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run small steps once, on a separate store; on a CPU, capture the graphs of decode steps."""
        self.resources.warm_up()

    def add(self, request: StageRequest) -> None:
        """Accept a request. Raises `InvalidRequest` if the stage model rejects it or its id is in use."""
        if self._active.of(request.request_id):
            raise InvalidRequest(f"request {request.request_id!r} is running already", field="request_id")
        check_logprobs(request, self._config.max_logprobs)
        order = rank(self._config.scheduling, request.priority, request.arrival, self._serial)
        sequence = Sequence(branches.prepared(request, self._model, self._config), self._model, order)
        sequence.compiling = self._grammars.ask(request)
        branches.begin(sequence)
        self._serial += branches.SERIALS
        self._active.add(sequence)

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        """Take a chunk from upstream. Errors in it are returned by the next `step` as that request's error; so is the
        end of a request with nothing to generate."""
        members = self._active.of(request_id)
        if not members:
            return
        try:
            self.give(request_id, self._model.feed(members[0].state, upstream, payload, final=final))
        except SegueError as error:
            self._stalled = False
            self._between.append(self._active.fail(request_id, error))

    def give(self, request_id: str, fed: Fed) -> None:
        """Take what a chunk gave. Errors as in `feed`."""
        sequence = self._active.of(request_id)[0]
        self._stalled = False
        try:
            if fed.nothing:
                self._active.drop(request_id)
                self._between += [
                    TokenOutput(request_id, index=index, finished=True, finish_reason="stop")
                    for index in range(sequence.request.outputs)
                ]
            elif sequence.branches is None or sequence.prompt is None:
                sequence.feed(fed, self.resources.longest_with(fed.prompt), self.resources.share_size)
                if isinstance(sequence.branches, BeamGroup) and sequence.prompt is not None:
                    sequence.branches.limit(self._config.num_blocks, self._scheduler.limits)
                self._end_if_over(sequence)
        except SegueError as error:
            self._between.append(self._active.fail(request_id, error))

    def go_on(self, request_id: str) -> None:
        """Draw after the input of this visit. Errors are returned by the next `step`, as for `feed`."""
        self._end_input(request_id, Then.TURN)

    def close(self, request_id: str) -> None:
        """End a request that holds after its last visit."""
        self._end_input(request_id, Then.END)

    def _end_input(self, request_id: str, then: Then) -> None:
        for sequence in self._active.of(request_id)[:1]:
            self._stalled = False
            try:
                sequence.end_input(then, self.resources.share_size)
            except SegueError as error:
                self._between.append(self._active.fail(request_id, error))
            else:
                self._end_if_over(sequence)

    def _end_if_over(self, sequence: Sequence) -> None:
        """Remove a sequence that was closed after its last turn and has nothing left to report."""
        if sequence.over and sequence.reported:
            self._between.append(_ended(sequence))
            self._completion.end(sequence, self._between[-1])

    def cancel(self, request_id: str) -> None:
        """Drop the request and free its blocks."""
        if self._active.of(request_id):
            self._active.drop(request_id)
            self._stalled = False  # other requests may get its blocks
        self._between = [output for output in self._between if output.request_id != request_id]

    def pause(self, request_id: str) -> None:
        """Stop scheduling the request; it is the first to be preempted."""
        self._set_paused(request_id, True)

    def resume(self, request_id: str) -> None:
        """Undo `pause`."""
        self._set_paused(request_id, False)

    def backlog(self, request_id: str) -> int:
        """Number of chunks fed but not yet used: rows that wait for their tokens."""
        members = self._active.of(request_id)
        return members[0].backlog() if members else 0

    def lent(self, request_id: str) -> list[int] | None:
        """The blocks of a sequence that lends them (`Then.LEND`), once all of its tokens but the last are computed."""
        scheduled = self._active.of(request_id)[0].scheduled
        return scheduled.blocks if scheduled.holding and not scheduled.dispatched else None

    def has_work(self) -> bool:
        """True if `step` would do something now."""
        if self._between or self._in_flight is not None or any(map(_compiled, self._active)):
            return True
        return not self._stalled and any(sequence.scheduled.runnable for sequence in self._active)

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """Dispatch the next step, then complete the previous one; complete it first if the next one depends on it."""
        moment = self._ranks.same(self._moment, Moment)
        self._take_grammars(moment.compiled)
        self._scheduler.expire(moment.now - self._config.hold_seconds)
        outputs, self._between = self._between, []
        before, self._in_flight = self._in_flight, None
        step = self._dispatch(before)
        if before is not None:
            outputs += self._complete(before)
            step = step or self._dispatch(None)
        if step is not None and self._ahead and step.open:
            self._in_flight = step
        elif step is not None:
            outputs += self._complete(step)
        self._active.forget_kept()
        self._scheduler.note_holding(moment.now)
        if not self._active and self._in_flight is None:
            self.resources.pool.audit_idle()
        return outputs

    def stats(self) -> dict[str, float]:
        """Gauges: queue lengths, blocks; counters since the start: preemptions and tokens."""
        scheduler = self._scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "holding": sum(sequence.holds for sequence in self._active),
            "held_blocks": len({block for one in scheduler.holding for block in one.blocks}),
            "holds_expired_total": scheduler.expired,
            "batch": self._batch,
            "blocks_used": self.resources.pool.used,
            "blocks": self.resources.pool.total,
            "prefix_states": 0 if scheduler.snapshots is None else scheduler.snapshots.kept,
            "kv_waste": scheduler.waste(),
            "preemptions_total": scheduler.preemptions,
            "recorded_steps_total": self._dispatcher.recorded_steps,
            "prefix_hit_tokens_total": scheduler.hit_tokens,
            "prefix_query_tokens_total": scheduler.query_tokens,
            "generated_tokens_total": self._completion.generated_tokens,
            "prefill_tokens_total": self._completion.prefill_tokens,
            **(self._speculation.stats() if self._speculation is not None else NO_SPECULATION),
        }

    def audit(self) -> None:
        """Check all state; an `AssertionError` says what is inconsistent. For tests, after every step."""
        self._scheduler.audit()
        assert len(self._active) == len(self._scheduler.running) + len(self._scheduler.waiting), "a sequence is lost"
        if self._speculation is not None:
            self._speculation.audit()

    def shared_state(self) -> dict[str, Any]:
        """The state that all ranks must have in common between two steps, by name."""
        scheduler = self._scheduler
        every = {sequence.scheduled.key: sequence.scheduled for sequence in self._active}
        return {
            "sequences": list(every),
            "running": [one.key for one in scheduler.running],
            "waiting": [one.key for one in scheduler.waiting],
            "lengths": [(one.length, one.ready, one.computed, one.paused) for one in every.values()],
            "newest tokens": [sequence.ids[-1:] for sequence in self._active],
            "blocks": [[(table.first, table.blocks) for table in one.tables] for one in every.values()],
            "states": [(one.slot, one.held) for one in every.values()],
            "pool": (self.resources.pool.available, scheduler.preemptions),
        }

    def _moment(self) -> Moment:
        compiled = [
            (sequence.scheduled.key, sequence.compiling.error is not None)
            for sequence in self._active
            if sequence.compiling is not None and sequence.compiling.done
        ]
        return Moment(self._clock(), compiled)

    def _take_grammars(self, compiled: Seq[tuple[str, bool]]) -> None:
        """Unblock sequences whose grammars are compiled, and fail those whose grammars did not compile."""
        for key, failed in compiled:
            sequence = self._active[key]
            compilation, request = sequence.compiling, sequence.request
            assert compilation is not None
            if not self._ranks.first:
                compilation.settle(None, StageFailed("cannot be compiled") if failed else None)
            try:
                if (error := compilation.error) is not None:
                    field = form_field(request)
                    raise type(error)(f"{field} {error.message}", field=field) from error
                sequence.take_grammar(self._grammars.grammar(compilation, request.sampling.stop_token_ids or ()))
                sequence.refresh(self.resources.share_size)
            except SegueError as failed:
                self._between.append(self._active.fail(request.request_id, failed))
            self._stalled = False

    # --- a step ------------------------------------------------------------------------------------------------------

    def _dispatch(self, before: StepInFlight | None) -> StepInFlight | None:
        """Draft, schedule, run. `before`: the step in flight; all of its sequences continue, whatever it draws. Returns
        None if nothing can run, or if `before` must complete first."""
        if before is not None:
            self._expect(before)
        elif self._speculation is not None:
            self._speculation.propose(self._active, self._scheduler.limits, self._model.vocab_size, self._ranks)
        began = time.perf_counter()
        decision = self._decide(() if before is None else tuple(before.runs.values()))
        if before is not None and (decision.preempt or not decision.runs):
            return None
        copies = self._scheduler.apply(decision)
        self._put_aside(decision.preempt)
        self._batch = len(decision.runs)
        self._stalled = not decision.runs and not decision.preempt
        if not decision.runs:
            return None
        step = self._dispatcher.plan(decision.runs, self._active)
        step.began = began
        self._scheduler.dispatched(decision.runs)
        try:
            self.resources.store.copy(copies)
            if self.resources.states is not None and self._scheduler.slots is not None:
                self.resources.states.copy(self._scheduler.slots.take_copies())
            self._dispatcher.run(step, None if before is None else before.drawn)
        except Exception as error:  # a network may raise anything: every sequence of the step gets the error
            self._check_in_step(error)
            step.failure = _failure(step, error)
            return step
        step.open = all(sequence.foreseeable and not sequence.wants_rows for sequence in step.runs)
        return step

    def _decide(self, in_flight: Seq[ScheduledTokens]) -> Decision:
        """Decide the next step; with several ranks, rank 0 does."""
        if self._ranks.alone:
            return self._scheduler.next(in_flight)
        message = self._ranks.same(lambda: DecisionMessage.of(self._scheduler.next(in_flight)), DecisionMessage)
        return message.decision(lambda key: self._active[key].scheduled)

    def _check_in_step(self, error: Exception) -> None:
        """Raise `ReplicaBroken` after an error in a step if there are other ranks, which may wait in a collective."""
        if not self._ranks.alone:
            end_where_lost(error)
            raise self._ranks.out_of_step(error)

    def _expect(self, step: StepInFlight) -> None:
        """Advance its sequences as if it had completed and had given each the token it draws."""
        step.expected = True
        for sequence, run in step.runs.items():
            if sequence in self._active:
                drawn = run.stop == sequence.scheduled.length
                self._scheduler.expect(run)
                if drawn:
                    sequence.expect(self.resources.share_size)

    def _complete(self, step: StepInFlight) -> list[TokenOutput]:
        """Wait for the device, then postprocess."""
        self._scheduler.completed(step.runs.values())
        if step.expected:  # undo the assumption: the real result is known
            for sequence, run in step.runs.items():
                if sequence in self._active:
                    self._scheduler.recall(run)
                    sequence.refresh(self.resources.share_size)
        if step.failure is None:
            try:
                results = self._dispatcher.read(step)
            except Exception as error:  # errors that the device reports asynchronously
                self._check_in_step(error)
                step.failure = _failure(step, error)
        if step.failure is not None:
            outputs = self._completion.failed(step.runs, step.failure)
        else:
            outputs = self._completion.outputs(step, results)
            if self._speculation is not None:
                seconds = time.perf_counter() - step.began
                self._speculation.learn(step.runs, self._active, step.hidden, step.positions, seconds)
        self._scheduler.settle()
        self._stalled = False
        return outputs

    def _put_aside(self, preempted: Seq[ScheduledSequence]) -> None:
        """Make the beams of each preempted group wait as one sequence."""
        groups = dict.fromkeys(self._active[one.key].branches for one in preempted if one.beam_group)
        for group in groups:
            assert isinstance(group, BeamGroup)
            group.put_aside(self._active, self.resources.share_size)

    def _set_paused(self, request_id: str, paused: bool) -> None:
        for sequence in self._active.of(request_id):
            sequence.scheduled.paused = paused
            self._stalled = False


def _compiled(sequence: Sequence) -> bool:
    """Whether the grammar it waits for has compiled or failed."""
    return sequence.compiling is not None and sequence.compiling.done


def _ended(sequence: Sequence) -> TokenOutput:
    """The last output of a sequence that was closed after a turn."""
    reason, stop = sequence.last_end
    return TokenOutput(
        sequence.request.request_id,
        first_index=sequence.emitted,
        finished=True,
        finish_reason=reason,
        stop_reason=stop,
    )


def _failure(step: StepInFlight, error: Exception) -> StageFailed:
    """Wrap a model's exception as the failure of this batch alone. Raises `DeviceLost` if the device takes no more
    calls."""
    end_where_lost(error)
    stage = next(iter(step.runs)).request.stage
    failed = StageFailed(f"forward failed: {type(error).__name__}: {error}", stage=stage)
    failed.__cause__ = error
    return failed
