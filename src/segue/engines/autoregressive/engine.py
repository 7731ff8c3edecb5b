"""The autoregressive engine: continuous batching over a paged KV cache. Read `step` first."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from segue.engines.autoregressive import branches
from segue.engines.autoregressive.beam_group import BeamGroup
from segue.engines.autoregressive.blocks import BlockPool
from segue.engines.autoregressive.branches import Forks
from segue.engines.autoregressive.check import check_attention, check_mutual_served, check_states_served
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveAdapter, Prompt
from segue.engines.autoregressive.decode_graphs import recorded_decodes, recorded_lists
from segue.engines.autoregressive.grammar import Grammars
from segue.engines.autoregressive.inputs import Scheduled
from segue.engines.autoregressive.invariant import InvariantAdapter, check_invariant
from segue.engines.autoregressive.jobs import Job, Limits, Run
from segue.engines.autoregressive.launch import Flight, Landed, Launcher, Ran
from segue.engines.autoregressive.logprobs import check_logprobs
from segue.engines.autoregressive.memory import drafting_states, prefix_states, stored_as
from segue.engines.autoregressive.mutual import longest_of
from segue.engines.autoregressive.outputs import accept, announce, give_rows, nothing_left
from segue.engines.autoregressive.picks import Pick
from segue.engines.autoregressive.policies import Accounts, rank
from segue.engines.autoregressive.roster import Roster
from segue.engines.autoregressive.scheduler import Scheduler
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.slots import StateSlots
from segue.engines.autoregressive.snapshots import Snapshots
from segue.engines.autoregressive.speculation.speculation import NO_SPECULATION, Speculation
from segue.engines.autoregressive.warm_up import warm_up
from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.kernels.backends import attention_backend
from segue.kernels.look_back import check_chunks
from segue.kernels.native_attention import NativeAttention
from segue.kernels.paged_step import HybridStep, PagedStep
from segue.kernels.state_store import StateStore
from segue.messages.errors import ConfigError, InvalidRequest, SegueError, StageFailed


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
        if adapter.kv.states is not None:
            check_states_served(adapter.kv.states, config.deterministic, speculation)
        kernel = "torch" if config.deterministic else config.attention
        backend = attention_backend(kernel, adapter.device, config.block_size)
        if config.kv_dtype != "auto" and backend is not None and not backend.widens:
            raise ConfigError(f"attention {kernel!r} cannot read a cache in {config.kv_dtype}", field="kv_dtype")
        if adapter.kv.mutual:
            check_mutual_served(kernel, backend, adapter.kv.windows, deterministic=config.deterministic)
        check_attention(adapter, backend)
        if config.deterministic:
            adapter = InvariantAdapter(adapter)
            check_invariant(adapter)
        self._adapter = adapter
        self._config = config
        self._speculation = speculation
        spec = stored_as(adapter.kv, config.kv_dtype)
        layout = spec.layout(adapter.max_model_len)
        check_chunks(layout.windows, config.block_size)
        kept = spec.states
        # a recording would have to know which slots it reads
        recorded = backend is not None and backend.recordable and not config.enforce_eager and kept is None
        self._recorded = recorded
        self._store = spec.store(
            layout,
            num_blocks=config.num_blocks + recorded,  # recordings pad their batches with rows of a block of nobody
            block_size=config.block_size,
            dtype=spec.dtype,
            stored=spec.stored,
            device=adapter.device,
            capture_width=spec.capture_width,
            capture_dtype=spec.capture_dtype,
            backend=backend,
        )
        self._pool = BlockPool(config.num_blocks)
        limits = Limits(
            config.block_size, config.max_batch, config.max_tokens_per_step, layout.windows, config.prefill_chunk
        )
        slots = None if kept is None else StateSlots(config.max_batch)
        snapshots, self._states, shares = None, None, config.prefix_caching
        if kept is not None and slots is not None:
            count = prefix_states(spec, config.max_batch, config.prefix_states, None, caching=config.prefix_caching)
            shares = count > 0
            count += drafting_states(config.max_batch, speculation is not None)
            snapshots = Snapshots(slots.total, count) if count else None
            self._states = StateStore(kept, slots.total + count, adapter.device)
        accounts = Accounts() if config.scheduling == "fair" else None
        self._scheduler = Scheduler(self._pool, limits, accounts, slots, snapshots)
        self._entire = kept is not None and not kept.continues
        most = adapter.max_model_len
        self._longest = limits.longest(config.num_blocks, most, most if self._entire else 1)
        graphs = None
        if recorded and not isinstance(backend, NativeAttention):
            graphs = recorded_decodes(adapter, self._store, self._longest, config.max_batch)
        self._share_size = config.block_size if shares else 0
        self._launcher = Launcher(adapter, self._store, graphs, self._share_size, self._states)
        # what a drafter guesses hangs on the tokens before, and on their states
        self._ahead = speculation is None and (adapter.device.type != "cpu" if ahead is None else ahead)
        self._flight: Flight | None = None
        """The step that was launched and has not landed."""
        self._grammars = grammars or Grammars.of(adapter)
        self._roster = Roster(self._scheduler)
        self._between: list[StageOutput] = []
        """Ends that came of a chunk, not of a step: emitted by the next step."""
        self._serial = 0
        self._stalled = False  # the last decision was empty, and nothing has happened since then
        self._generated_tokens = 0
        self._prefill_tokens = 0
        self._batch = 0

    # --- the contract ------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run small steps once, on a store of their own; on a CPU, record those of single tokens."""
        warm_up(self._adapter, self._config, self._store.backend)
        if self._recorded and isinstance(self._store.backend, NativeAttention):
            self._launcher.graphs = recorded_lists(self._adapter, self._store, self._longest, self._config.max_batch)

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
                self._drop(request_id)
                self._between += [
                    StageOutput(request_id, index=index, finished=True, finish_reason="stop")
                    for index in range(sequence.request.outputs)
                ]
            elif sequence.branches is None or sequence.prompt is None:
                sequence.feed(fed, self._longest_with(fed.prompt), self._share_size)
                if isinstance(sequence.branches, BeamGroup) and sequence.prompt is not None:
                    sequence.branches.limit(self._config.num_blocks, self._scheduler.limits)
        except SegueError as error:
            self._between.append(self._fail(request_id, error))

    def cancel(self, request_id: str) -> None:
        """Forget the request and free its blocks."""
        self._drop(request_id)
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
            self._pool.audit_idle()
        return outputs

    def stats(self) -> dict[str, float]:
        """Gauges: queue lengths, blocks; counters since the start: preemptions and tokens."""
        scheduler = self._scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "batch": self._batch,
            "blocks_used": self._pool.used,
            "blocks": self._pool.total,
            "prefix_states": 0 if scheduler.snapshots is None else scheduler.snapshots.kept,
            "kv_waste": scheduler.waste(),
            "preemptions_total": scheduler.preemptions,
            "recorded_steps_total": self._launcher.recorded_steps,
            "prefix_hit_tokens_total": scheduler.hit_tokens,
            "prefix_query_tokens_total": scheduler.query_tokens,
            "generated_tokens_total": self._generated_tokens,
            "prefill_tokens_total": self._prefill_tokens,
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
                    field = f"sampling.{request.stage}.structured_outputs"
                    raise type(error)(f"{field} {error.message}", field=field) from error
                sequence.take_grammar(self._grammars.grammar(compilation, request.sampling.stop_token_ids or ()))
                sequence.refresh(self._share_size)
            except SegueError as failed:
                self._between.append(self._fail(request.request_id, failed))
            self._stalled = False

    def _longest_with(self, prompt: Prompt | None) -> int:
        """The most tokens that a sequence can have."""
        if prompt is None or not prompt.mutual or self._entire:
            return self._longest
        limits, most = self._scheduler.limits, self._adapter.max_model_len
        return limits.longest(self._config.num_blocks, most, longest_of(prompt.mutual))

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
            self._store.copy(copies)
            if self._states is not None and self._scheduler.slots is not None:
                self._states.copy(self._scheduler.slots.take_copies())
            ran = self._launcher.run(scheduled, attention, None if before is None else before.newest)
        except Exception as error:
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
                    sequence.expect(self._share_size)

    def _land(self, flight: Flight) -> list[StageOutput]:
        """Wait for the device; then postprocess."""
        self._scheduler.landed(flight.runs)
        if flight.expected:  # now it is known
            for sequence, run in flight.scheduled:
                if sequence in self._roster:
                    self._scheduler.recall(run)
                    sequence.refresh(self._share_size)
        ran = flight.ran
        if not isinstance(ran, StageFailed):
            try:
                landed = self._launcher.read(ran)
            except Exception as error:  # what a device says late
                ran = _failure(flight.scheduled, error)
        if isinstance(ran, StageFailed):
            here = (sequence for sequence, _ in flight.scheduled if sequence in self._roster)
            ids = dict.fromkeys(sequence.request.request_id for sequence in here)
            outputs = [self._fail(request_id, ran, scrub=True) for request_id in ids]
        else:
            outputs = self._postprocess(flight.scheduled, ran, landed)
            outputs += self._advance(ran.searches)
            if self._speculation is not None:
                alive = {sequence.job.key for sequence, _ in flight.scheduled if sequence in self._roster}
                seconds = time.perf_counter() - flight.began
                self._speculation.learn(flight.scheduled, alive, ran.hidden, ran.positions, seconds)
        self._scheduler.settle()
        self._stalled = False
        return outputs

    def _postprocess(self, scheduled: list[Scheduled], ran: Ran, landed: Landed) -> list[StageOutput]:
        outputs: list[StageOutput] = []
        picks = landed.picks
        begin = end = 0
        for sequence, run in scheduled:
            begin, end = end, end + run.tokens
            finite = bool(landed.finite[begin:end].all())
            if sequence not in self._roster:
                # its request has failed in this step, or was over when it landed: nobody else has its blocks yet
                if not finite:
                    self._store.scrub(self._pool.private(run.job.blocks))
                continue
            forks = self._new_forks(sequence)
            taken = [picks[fork.job.key] for fork in (sequence, *forks) if fork.job.key in picks]
            broken = not finite or not all(picked.finite for picked in taken)
            if broken and run.drafts:
                self._undo(sequence, run, ran.attention, slice(begin, end))
                continue
            if broken:
                error = StageFailed("the model gave NaN or infinity for this request", stage=sequence.request.stage)
                outputs.append(self._fail(sequence.request.request_id, error, scrub=True))
                continue
            if any(picked.stuck for picked in taken):
                outputs.append(self._fail(sequence.request.request_id, nothing_left(sequence)))
                continue
            if ran.captured is None and self._store.rows is not None:
                sequence.shareable = False  # without captured rows a block is no hit for those who want them
            self._prefill_tokens += max(0, min(run.stop, sequence.prompt_length) - run.start)
            if forks:  # they take over what it has computed
                self._scheduler.advance(sequence.job, run.stop, publish=sequence.shareable)
            for fork in forks:
                self._roster.fork(sequence, fork)
            rows = None if ran.captured is None else ran.captured[begin:end]
            for branch in (sequence, *forks):
                output, new = self._output(branch, run, picks.get(branch.job.key), rows, forked=bool(forks))
                if output.error is not None:
                    outputs.append(self._fail(output.request_id, output.error))
                    break
                if new:
                    outputs += branch.branches.give(output) if isinstance(branch.branches, Forks) else [output]
                if output.finished:
                    self._remove(branch)
        return outputs

    def _output(
        self, sequence: Sequence, run: Run, picked: Pick | None, captured: torch.Tensor | None, *, forked: bool
    ) -> tuple[StageOutput, bool]:
        """What a step has made for a sequence, and whether there is any. `captured`: [tokens of the run, width]."""
        output = StageOutput(sequence.request.request_id, index=sequence.index)
        new = announce(sequence, run, output)
        if picked is not None:
            if sequence.index == 0 and sequence.generated == 0:
                sequence.tell_prompt(output)
            self._accept(sequence, run, picked, output)
            new = True
        if output.error is not None:
            return output, new
        if not forked:
            # the newest token is never computed: rejected drafts come after it, and what follows an end
            computed = run.stop if picked is None else sequence.job.length - 1
            self._scheduler.advance(sequence.job, computed, publish=sequence.shareable)
        if captured is not None and sequence.wants_rows:
            rows = captured[: sequence.job.computed - run.start]
            new |= give_rows(sequence, run, rows, self._store, output)
        return output, new

    def _undo(self, sequence: Sequence, run: Run, attention: PagedStep | HybridStep, rows: slice) -> None:
        """NaN in a run with drafts: it may come of a wrong one, and masked it spoils those before it all the same. The
        next step computes the tokens again, without drafts. `rows`: of the flat batch."""
        for group in attention.groups if isinstance(attention, HybridStep) else [attention]:
            self._store.scrub_slots(group.slots[rows])
        if sequence.job.slot is None:
            self._scheduler.advance(sequence.job, run.start, publish=False)
        else:  # its state may hold it, too
            self._scheduler.restart(sequence.job)
        sequence.propose([])
        sequence.wary = True

    def _new_forks(self, sequence: Sequence) -> list[Sequence]:
        """The forks of a sequence that has computed its prompt in this step."""
        forks: list[Sequence] = []
        if isinstance(sequence.branches, Forks):
            forks, sequence.branches.new = sequence.branches.new, []
        return forks

    def _advance(self, searches: list[BeamGroup]) -> list[StageOutput]:
        """The beams of the next step, or the outputs of searches that are over."""
        outputs: list[StageOutput] = []
        for search in searches:
            request_id = search.root.request.request_id
            if not self._roster.of(request_id):
                continue  # it has failed in this step
            try:
                ended = search.advance(self._roster, self._share_size)
            except SegueError as error:
                outputs.append(self._fail(request_id, error, scrub=True))
            else:
                outputs += ended
                self._generated_tokens += sum(len(output.token_ids) for output in ended)
                self._stalled = False
        return outputs

    def _put_aside(self, preempted: Seq[Job]) -> None:
        """Beams that were preempted wait as one sequence."""
        groups = dict.fromkeys(self._roster[job.key].branches for job in preempted if job.gang)
        for group in groups:
            assert isinstance(group, BeamGroup)
            group.put_aside(self._roster, self._share_size)

    def _accept(self, sequence: Sequence, run: Run, picked: Pick, output: StageOutput) -> None:
        known = sequence.generated
        accept(sequence, picked, self._share_size, output)
        new = sequence.generated - known
        self._generated_tokens += new
        if self._speculation is not None:
            self._speculation.verified(sequence, run.drafts, picked.accepted, new)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _fail(self, request_id: str, error: SegueError, *, scrub: bool = False) -> StageOutput:
        """The output of a request that fails. `scrub`: its K and V may hold NaN, which would spoil, through the masked
        part of a block, whoever gets the block next."""
        if scrub:
            held = [block for sequence in self._roster.of(request_id) for block in sequence.job.blocks]
            self._store.scrub(self._pool.private(held))
        self._drop(request_id)
        return StageOutput(request_id, error=error)

    def _drop(self, request_id: str) -> None:
        for sequence in self._roster.of(request_id):
            self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._roster.remove(sequence)
        self._stalled = False
        if self._speculation is not None:
            self._speculation.forget(sequence.job.key)

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
