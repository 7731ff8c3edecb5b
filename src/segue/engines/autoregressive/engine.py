"""The autoregressive engine: continuous batching over a paged KV cache. Read `step` first."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from segue.engines.autoregressive import branches
from segue.engines.autoregressive.beam_group import BeamGroup
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveAdapter
from segue.engines.autoregressive.grammar import Grammars, form_field
from segue.engines.autoregressive.inputs import Scheduled
from segue.engines.autoregressive.jobs import Job
from segue.engines.autoregressive.landing import Landing
from segue.engines.autoregressive.launch import Flight
from segue.engines.autoregressive.leaving import Leaving
from segue.engines.autoregressive.logprobs import check_logprobs
from segue.engines.autoregressive.policies import rank
from segue.engines.autoregressive.resources import allocate
from segue.engines.autoregressive.roster import Roster
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.speculation import NO_SPECULATION, Speculation
from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.messages.errors import InvalidRequest, SegueError, StageFailed


class AutoregressiveEngine:
    """Implements `segue.engines.contract.Engine` for a decoder behind an `AutoregressiveAdapter`."""

    def __init__(
        self,
        adapter: AutoregressiveAdapter,
        config: AutoregressiveConfig,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
        *,
        ahead: bool | None = None,
    ) -> None:
        """Allocates the KV cache. Raises `ConfigError` for a model that cannot be served in flat batches.

        `grammars` wakes whoever waits for work when a grammar is there; None: nobody does. `ahead`: launch a step
        before the one before it has landed, where that can be; None: on devices that run beside the host.
        """
        resources = allocate(adapter, config, speculation)
        self.resources = resources
        """To be looked at, by nobody else to be changed."""
        self._adapter = resources.adapter
        self._config = config
        self._scheduler = resources.scheduler
        self._launcher = resources.launcher
        self._speculation = speculation
        # what a drafter guesses hangs on the tokens before, and on their states
        self._ahead = speculation is None and (adapter.device.type != "cpu" if ahead is None else ahead)
        self._flight: Flight | None = None
        """The step that was launched and has not landed."""
        self._grammars = grammars or Grammars.of(self._adapter)
        self._roster = Roster(resources.scheduler)
        self._leaving = Leaving(self._roster, resources.pool, resources.store, speculation)
        self._landing = Landing(resources, self._roster, self._leaving, speculation)
        self._between: list[StageOutput] = []
        """Ends that came of a chunk, not of a step: emitted by the next step."""
        self._serial = 0
        self._stalled = False  # the last decision was empty, and nothing has happened since then
        self._batch = 0

    # --- the contract ------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run small steps once, on a store of their own; on a CPU, record those of single tokens."""
        self.resources.warm_up()

    def add(self, request: StageRequest) -> None:
        """Take a request. Raises `InvalidRequest` where the adapter does, or when its id is in use."""
        if self._roster.of(request.request_id):
            raise InvalidRequest(f"request {request.request_id!r} is running already", field="request_id")
        check_logprobs(request, self._config.max_logprobs)
        order = rank(self._config.scheduling, request.priority, request.arrival, self._serial)
        sequence = Sequence(branches.prepared(request, self._adapter, self._config), self._adapter, order)
        sequence.compiling = self._grammars.ask(request)
        branches.begin(sequence)
        self._serial += branches.SERIALS
        self._roster.add(sequence)

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        """A chunk from upstream. What is wrong with it comes out of the next `step`, as that request's error; so does
        the end of a request of which there is nothing to generate."""
        members = self._roster.of(request_id)
        if not members:
            return
        sequence = members[0]
        self._stalled = False
        try:
            fed = self._adapter.feed(sequence.state, upstream, payload, final=final)
            if fed.nothing:
                self._leaving.drop(request_id)
                self._between += [
                    StageOutput(request_id, index=index, finished=True, finish_reason="stop")
                    for index in range(sequence.request.outputs)
                ]
            elif sequence.branches is None or sequence.prompt is None:
                sequence.feed(fed, self.resources.longest_with(fed.prompt), self.resources.share_size)
                if isinstance(sequence.branches, BeamGroup) and sequence.prompt is not None:
                    sequence.branches.limit(self._config.num_blocks, self._scheduler.limits)
        except SegueError as error:
            self._between.append(self._leaving.fail(request_id, error))

    def cancel(self, request_id: str) -> None:
        """Forget the request and free its blocks."""
        if self._roster.of(request_id):
            self._leaving.drop(request_id)
            self._stalled = False  # others may get what it held
        self._between = [output for output in self._between if output.request_id != request_id]

    def pause(self, request_id: str) -> None:
        """Do not schedule it; it is the first to be preempted."""
        self._set_paused(request_id, True)

    def resume(self, request_id: str) -> None:
        """Undo `pause`."""
        self._set_paused(request_id, False)

    def backlog(self, request_id: str) -> int:
        """Chunks fed and not used yet: rows that wait for their tokens."""
        members = self._roster.of(request_id)
        return members[0].backlog() if members else 0

    def has_work(self) -> bool:
        """True if `step` would do something now."""
        if self._between or self._flight is not None or any(map(_compiled, self._roster)):
            return True
        return not self._stalled and any(sequence.job.runnable for sequence in self._roster)

    @torch.inference_mode()
    def step(self) -> list[StageOutput]:
        """Launch the next step and land the one before it; or that one first, where it decides what comes next."""
        self._take_grammars()
        outputs, self._between = self._between, []
        before, self._flight = self._flight, None
        flight = self._launch(before)
        if before is not None:
            outputs += self._land(before)
            flight = flight or self._launch(None)
        if flight is not None and self._ahead and flight.open:
            self._flight = flight
        elif flight is not None:
            outputs += self._land(flight)
        if not self._roster and self._flight is None:
            self.resources.pool.audit_idle()
        return outputs

    def stats(self) -> dict[str, float]:
        """Gauges: queue lengths, blocks; counters since the start: preemptions and tokens."""
        scheduler = self._scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "batch": self._batch,
            "blocks_used": self.resources.pool.used,
            "blocks": self.resources.pool.total,
            "prefix_states": 0 if scheduler.snapshots is None else scheduler.snapshots.kept,
            "kv_waste": scheduler.waste(),
            "preemptions_total": scheduler.preemptions,
            "recorded_steps_total": self._launcher.recorded_steps,
            "prefix_hit_tokens_total": scheduler.hit_tokens,
            "prefix_query_tokens_total": scheduler.query_tokens,
            "generated_tokens_total": self._landing.generated_tokens,
            "prefill_tokens_total": self._landing.prefill_tokens,
            **(self._speculation.stats() if self._speculation is not None else NO_SPECULATION),
        }

    def audit(self) -> None:
        """Check all books; an `AssertionError` says what is off. For tests, after every step."""
        self._scheduler.audit()
        assert len(self._roster) == len(self._scheduler.running) + len(self._scheduler.waiting), "a sequence is lost"
        if self._speculation is not None:
            self._speculation.audit()

    def _take_grammars(self) -> None:
        """Let those run whose grammars are there, and fail those whose grammars cannot be had."""
        for sequence in [sequence for sequence in self._roster if _compiled(sequence)]:
            compilation, request = sequence.compiling, sequence.request
            assert compilation is not None
            try:
                if (error := compilation.error) is not None:
                    field = form_field(request)
                    raise type(error)(f"{field} {error.message}", field=field) from error
                sequence.take_grammar(self._grammars.grammar(compilation, request.sampling.stop_token_ids or ()))
                sequence.refresh(self.resources.share_size)
            except SegueError as failed:
                self._between.append(self._leaving.fail(request.request_id, failed))
            self._stalled = False

    # --- a step ------------------------------------------------------------------------------------------------------

    def _launch(self, before: Flight | None) -> Flight | None:
        """Draft, schedule, run. `before`: the step that was launched last and has not landed: all of its sequences go
        on, whatever it gives. None: nothing can run, or `before` must land first."""
        if before is not None:
            self._expect(before)
        elif self._speculation is not None:
            self._speculation.propose(self._roster, self._scheduler.limits, self._adapter.vocab_size)
        began = time.perf_counter()
        decision = self._scheduler.next(() if before is None else before.runs)
        if before is not None and (decision.preempt or not decision.runs):
            return None
        copies = self._scheduler.apply(decision)
        self._put_aside(decision.preempt)
        self._batch = len(decision.runs)
        self._stalled = not decision.runs and not decision.preempt
        if not decision.runs:
            return None
        scheduled, attention = self._launcher.plan(decision.runs, self._roster)
        self._scheduler.launched(decision.runs)
        try:
            self.resources.store.copy(copies)
            if self.resources.states is not None and self._scheduler.slots is not None:
                self.resources.states.copy(self._scheduler.slots.take_copies())
            ran = self._launcher.run(scheduled, attention, None if before is None else before.newest)
        except Exception as error:  # networks raise what they like: every sequence of the step is told of it
            return Flight(scheduled, _failure(scheduled, error), began, open=False)
        foreseeable = all(sequence.foreseeable and not sequence.wants_rows for sequence, _ in scheduled)
        return Flight(scheduled, ran, began, open=foreseeable)

    def _expect(self, flight: Flight) -> None:
        """Let its sequences look as if it had landed and had given each the token it draws."""
        flight.expected = True
        for sequence, run in flight.scheduled:
            if sequence in self._roster:
                drawn = run.stop == sequence.job.length
                self._scheduler.expect(run)
                if drawn:
                    sequence.expect(self.resources.share_size)

    def _land(self, flight: Flight) -> list[StageOutput]:
        """Wait for the device; then postprocess."""
        self._scheduler.landed(flight.runs)
        if flight.expected:  # now it is known
            for sequence, run in flight.scheduled:
                if sequence in self._roster:
                    self._scheduler.recall(run)
                    sequence.refresh(self.resources.share_size)
        ran = flight.ran
        if not isinstance(ran, StageFailed):
            try:
                landed = self._launcher.read(ran)
            except Exception as error:  # what a device says late
                ran = _failure(flight.scheduled, error)
        if isinstance(ran, StageFailed):
            outputs = self._landing.failed(flight.scheduled, ran)
        else:
            outputs = self._landing.outputs(flight.scheduled, ran, landed)
            if self._speculation is not None:
                alive = {sequence.job.key for sequence, _ in flight.scheduled if sequence in self._roster}
                seconds = time.perf_counter() - flight.began
                self._speculation.learn(flight.scheduled, alive, ran.hidden, ran.positions, seconds)
        self._scheduler.settle()
        self._stalled = False
        return outputs

    def _put_aside(self, preempted: Seq[Job]) -> None:
        """Beams that were preempted wait as one sequence."""
        groups = dict.fromkeys(self._roster[job.key].branches for job in preempted if job.gang)
        for group in groups:
            assert isinstance(group, BeamGroup)
            group.put_aside(self._roster, self.resources.share_size)

    def _set_paused(self, request_id: str, paused: bool) -> None:
        for sequence in self._roster.of(request_id):
            sequence.job.paused = paused
            self._stalled = False


def _compiled(sequence: Sequence) -> bool:
    """The grammar it waits for is there, or has failed."""
    return sequence.compiling is not None and sequence.compiling.done


def _failure(scheduled: Seq[Scheduled], error: Exception) -> StageFailed:
    """Whatever a model raises is the failure of this batch, and of nothing else."""
    stage = scheduled[0].sequence.request.stage
    failed = StageFailed(f"forward failed: {type(error).__name__}: {error}", stage=stage)
    failed.__cause__ = error
    return failed
