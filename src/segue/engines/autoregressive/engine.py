"""The autoregressive engine: continuous batching over a paged KV cache. Read `step` first."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from segue.engines.autoregressive.blocks import BlockPool
from segue.engines.autoregressive.check import check_attention
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveAdapter
from segue.engines.autoregressive.inputs import Scheduled, flat_batch
from segue.engines.autoregressive.logprobs import check_logprobs, gather_prompt_logprobs
from segue.engines.autoregressive.picks import Pick, pick, targets
from segue.engines.autoregressive.policies import Accounts, rank
from segue.engines.autoregressive.scheduler import Limits, Run, Scheduler
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.contract import Payload, Rows, StageOutput, StageRequest
from segue.kernels.kv_store import KVStore
from segue.kernels.paged_step import HybridStep, PagedStep, Part, paged_step, step_order
from segue.messages.errors import InvalidRequest, SegueError, StageFailed


class AutoregressiveEngine:
    """Implements `segue.engines.contract.Engine` for a decoder behind an `AutoregressiveAdapter`."""

    def __init__(self, adapter: AutoregressiveAdapter, config: AutoregressiveConfig) -> None:
        """Allocates the KV cache. Raises `ConfigError` for a model that cannot be served in flat batches."""
        check_attention(adapter)
        self._adapter = adapter
        self._config = config
        spec = adapter.kv
        layout = spec.layout(adapter.max_model_len)
        self._store = KVStore(
            layout,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=spec.dtype,
            device=adapter.device,
            capture_width=spec.capture_width,
            capture_dtype=spec.capture_dtype,
        )
        self._pool = BlockPool(config.num_blocks)
        limits = Limits(config.block_size, config.max_batch, config.max_tokens_per_step, layout.windows)
        self._scheduler = Scheduler(self._pool, limits, Accounts() if config.scheduling == "fair" else None)
        self._longest = limits.longest(config.num_blocks, adapter.max_model_len)
        self._share_size = config.block_size if config.prefix_caching else 0
        self._sequences: dict[str, Sequence] = {}
        self._between: list[StageOutput] = []
        """Ends that came of a chunk, not of a step: emitted by the next step."""
        self._serial = 0
        self._stalled = False  # the last decision was empty, and nothing has happened since then
        self._generated_tokens = 0
        self._prefill_tokens = 0
        self._batch = 0

    # --- the contract ------------------------------------------------------------------------------------------------

    def add(self, request: StageRequest) -> None:
        """Take a request. Raises `InvalidRequest` where the adapter does, or when its id is in use."""
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request {request.request_id!r} is running already", field="request_id")
        _check_served(request)
        check_logprobs(request, self._config.max_logprobs)
        order = rank(self._config.scheduling, request.priority, request.arrival, self._serial)
        sequence = Sequence(request, self._adapter, order)
        self._serial += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence.job)

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        """A chunk from upstream. What is wrong with it comes out of the next `step`, as that request's error; so does
        the end of a request of which there is nothing to generate."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        self._stalled = False
        try:
            fed = self._adapter.feed(sequence.state, upstream, payload, final=final)
            if fed.nothing:
                self._remove(sequence)
                self._between.append(StageOutput(request_id, finished=True, finish_reason="stop"))
            else:
                sequence.feed(fed, self._longest, self._share_size)
        except SegueError as error:
            self._between.append(self._fail(sequence, error))

    def cancel(self, request_id: str) -> None:
        """Forget the request and free its blocks."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._remove(sequence)
        self._between = [output for output in self._between if output.request_id != request_id]

    def pause(self, request_id: str) -> None:
        """Do not schedule it; it is the first to be preempted."""
        self._set_paused(request_id, True)

    def resume(self, request_id: str) -> None:
        """Undo `pause`."""
        self._set_paused(request_id, False)

    def backlog(self, request_id: str) -> int:
        """Chunks fed and not used yet: rows that wait for their tokens."""
        sequence = self._sequences.get(request_id)
        return sequence.backlog() if sequence is not None else 0

    def has_work(self) -> bool:
        """True if `step` would do something now."""
        if self._between:
            return True
        return not self._stalled and any(sequence.job.runnable for sequence in self._sequences.values())

    @torch.inference_mode()
    def step(self) -> list[StageOutput]:
        """Schedule, run, postprocess."""
        outputs, self._between = self._between, []
        decision = self._scheduler.next()
        self._scheduler.apply(decision)
        self._batch = len(decision.runs)
        self._stalled = not decision.runs and not decision.preempt
        if decision.runs:
            scheduled, attention = self._plan(decision.runs)
            try:
                hidden, captured, picks = self._forward(scheduled, attention)
            # whatever a model raises is the failure of this batch, and of nothing else
            except Exception as error:
                failed = StageFailed(f"forward failed: {type(error).__name__}: {error}", stage=_stage(scheduled))
                failed.__cause__ = error
                outputs += [self._fail(sequence, failed, scrub=True) for sequence, _ in scheduled]
            else:
                outputs += self._postprocess(scheduled, hidden, captured, picks)
        if not self._sequences:
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
            "preemptions_total": scheduler.preemptions,
            "prefix_hit_tokens_total": scheduler.hit_tokens,
            "prefix_query_tokens_total": scheduler.query_tokens,
            "generated_tokens_total": self._generated_tokens,
            "prefill_tokens_total": self._prefill_tokens,
        }

    def audit(self) -> None:
        """Check all books; an `AssertionError` says what is off. For tests, after every step."""
        self._scheduler.audit()
        assert len(self._sequences) == len(self._scheduler.running) + len(self._scheduler.waiting), "a sequence is lost"

    # --- a step ------------------------------------------------------------------------------------------------------

    def _plan(self, runs: Seq[Run]) -> tuple[list[Scheduled], PagedStep | HybridStep]:
        """The sequences of the step in the order of the flat batch, and what attention needs to know of them."""
        ordered = sorted(runs, key=step_order)
        scheduled = [Scheduled(self._sequences[run.job.key], run) for run in ordered]
        groups = [
            paged_step(self._store, [_part(run, group, self._config.block_size) for run in ordered])
            for group in range(self._store.layout.groups)
        ]
        return scheduled, groups[0] if len(groups) == 1 else HybridStep(groups, self._store.layout.group_of)

    def _forward(
        self, scheduled: list[Scheduled], attention: PagedStep | HybridStep
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Pick]]:
        """(is each flat token finite [tokens], captured rows [tokens, width], what was picked by request)."""
        adapter = self._adapter
        embeds, batch = flat_batch(adapter, scheduled, attention)
        hidden, captured = adapter.forward(embeds, batch)
        if captured is not None and self._store.rows is not None:
            captured = captured.to(self._store.rows.dtype)
            self._store.rows.index_copy_(0, attention.slots, captured)
        finite = torch.isfinite(hidden.sum(dim=-1, dtype=torch.float32))
        gather_prompt_logprobs(adapter, scheduled, hidden)
        wanted = targets(scheduled)
        rows = [row for target in wanted for row in target.rows]
        if not rows:
            return finite, captured, {}
        chosen = hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows, device=hidden.device)]
        return finite, captured, pick(wanted, adapter.logits(chosen), adapter.vocabulary)

    def _postprocess(
        self,
        scheduled: list[Scheduled],
        finite: torch.Tensor,
        captured: torch.Tensor | None,
        picks: dict[str, Pick],
    ) -> list[StageOutput]:
        outputs = []
        fine = None if bool(finite.all()) else finite.tolist()
        begin = 0
        for sequence, run in scheduled:
            key, end = sequence.job.key, begin + run.tokens
            picked = picks.get(key)
            broken = picked is not None and not picked.finite
            if broken or (fine is not None and not all(fine[begin:end])):
                error = StageFailed("the model gave NaN or infinity for this request", stage=sequence.request.stage)
                outputs.append(self._fail(sequence, error, scrub=True))
                begin = end
                continue
            if picked is not None and picked.stuck:
                outputs.append(self._fail(sequence, _nothing_left(sequence)))
                begin = end
                continue
            if captured is None and self._store.rows is not None:
                sequence.shareable = False  # without captured rows a block is no hit for those who want them
            self._scheduler.advance(sequence.job, run.stop, publish=sequence.shareable)
            output = StageOutput(key)
            new = self._announce(sequence, run, output)
            if captured is not None and sequence.wants_rows:
                new |= self._give_rows(sequence, run, captured[begin:end], output)
            if picked is not None:
                self._tell_prompt(sequence, output)
                self._accept(sequence, picked, output)
                new = True
            self._prefill_tokens += max(0, min(run.stop, sequence.prompt_length) - run.start)
            if new:
                outputs.append(output)
            if output.finished:
                self._remove(sequence)
            begin = end
        return outputs

    def _announce(self, sequence: Sequence, run: Run, output: StageOutput) -> bool:
        """The first output of a request: counts, and what an earlier attempt had generated."""
        output.first_index = sequence.generated
        if sequence.announced:
            return False
        assert sequence.prompt is not None
        sequence.announced = True
        output.prompt_tokens = sequence.prompt_length
        output.cached_tokens = min(run.start, sequence.prompt_length)
        output.modality_tokens = dict(sequence.prompt.modality_tokens)
        output.first_index = 0
        output.token_ids = sequence.request.resume[:-1]
        if sequence.text is not None:
            for count, token in enumerate(output.token_ids, 1):
                text, _ = sequence.text.push(token, ends=False, may_stop=count >= sequence.min_tokens)
                output.text += text
        return True

    def _tell_prompt(self, sequence: Sequence, output: StageOutput) -> None:
        """What the client asked to know of the prompt goes with the first token ever."""
        told = sequence.prompt_logprobs
        if told is not None:
            output.prompt_logprobs = told.found
            sequence.prompt_logprobs, sequence.job.fresh = None, False
        request = sequence.request
        if request.request.return_prompt_ids and not sequence.generated and "text" in request.to_client:
            output.prompt_token_ids = sequence.ids[: sequence.prompt_length]

    def _give_rows(self, sequence: Sequence, run: Run, computed: torch.Tensor, output: StageOutput) -> bool:
        """Captured rows that are not out yet: of this step, and of blocks found in the cache."""
        start = sequence.rows_given
        if start >= run.stop:
            return False
        if start >= run.start:
            data = computed[start - run.start :]
        else:
            rows = self._store.rows
            assert rows is not None
            size = self._config.block_size
            where = torch.arange(start, run.stop, device=rows.device)
            blocks = torch.tensor(sequence.job.tables[0].blocks, device=rows.device)  # group 0 keeps all of them
            data = rows[blocks[where // size] * size + where % size]
        output.captured = Rows(start, data)
        if start == 0:
            output.prompt = sequence.prompt
        sequence.rows_given = run.stop
        return True

    def _accept(self, sequence: Sequence, picked: Pick, output: StageOutput) -> None:
        """The new tokens, up to one that ends the output: their text, and whether the output ends."""
        for count, token in enumerate(picked.tokens, 1):
            sequence.append(token, self._share_size)
            output.token_ids = [*output.token_ids, token]
            output.logprobs = picked.logprobs[:count]
            self._generated_tokens += 1
            may_stop = sequence.generated >= sequence.min_tokens
            ends = token in sequence.end_ids
            found = False
            if sequence.text is not None:
                text, found = sequence.text.push(token, ends=ends, may_stop=may_stop)
                output.text += text
            if not (ends or found or sequence.generated >= sequence.most):
                continue
            output.finished = True
            output.finish_reason = "stop" if ends or found else "length"
            if sequence.text is not None and not found:
                output.text += sequence.text.flush(may_stop=may_stop)
            return

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: SegueError, *, scrub: bool = False) -> StageOutput:
        """The output of a request that fails. `scrub`: its K and V may hold NaN, which would spoil, through the masked
        part of a block, whoever gets the block next."""
        if scrub:
            self._store.scrub(self._pool.private(sequence.job.blocks))
        self._remove(sequence)
        return StageOutput(sequence.job.key, error=error)

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence.job)
        del self._sequences[sequence.job.key]
        self._stalled = False

    def _set_paused(self, request_id: str, paused: bool) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.job.paused = paused
            self._stalled = False


_UNSERVED: dict[str, tuple[object, ...]] = {
    "structured_outputs": (),
    "n": (1,),
    "best_of": (1,),
    "beam_width": (1,),
}
"""Parameters this engine does not serve yet → the values that ask for nothing. (Prompts are truncated before they come
here, by the input stage, which alone knows what may be cut.)"""


def _check_served(request: StageRequest) -> None:
    for name, nothing in _UNSERVED.items():
        value = getattr(request.sampling, name)
        if value is not None and value not in nothing:
            field = f"sampling.{request.stage}.{name}"
            raise InvalidRequest(f"{field} is {value!r}; this engine does not serve that yet", field=field)


def _nothing_left(sequence: Sequence) -> InvalidRequest:
    return InvalidRequest(
        f"after {sequence.generated} tokens, what the sampling of stage {sequence.request.stage!r} forbids leaves none "
        "to choose; see its allowed_token_ids, suppress_tokens, bad_words, min_tokens and structured_outputs",
        field=f"sampling.{sequence.request.stage}",
    )


def _part(run: Run, group: int, block_size: int) -> Part:
    """The run as a group of layers sees it: counted from the first block it still has."""
    table = run.job.tables[group]
    before = table.first * block_size
    return Part(table.blocks, run.start - before, run.stop - before)


def _stage(scheduled: list[Scheduled]) -> str:
    return scheduled[0].sequence.request.stage
