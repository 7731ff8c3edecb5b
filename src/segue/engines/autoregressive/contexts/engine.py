"""Contexts: what a request has read, lent to another engine of the worker that attends to it.

    chunks ──▶ thoughts, if any ──▶ contexts are prefilled and held ──▶ the last output: their views
                (a reply)                    │                                       │
                                       their blocks ◀── read in each step ── the other engine (a denoiser)
                                             │                                       │ it is done with the request
                                           freed ◀─────────── release ◀──────────────╯

A `View` is the beginning of a sequence. Contexts that begin alike are views of one sequence, so they share its blocks;
no block is copied. The other engine reads the blocks (`blocks`) and never writes them.

**Lent blocks stay.** A denoiser takes its next step from the same keys and values, so a sequence that lends its blocks
(`Then.LEND`) is not preempted. For this to be safe, a request begins to read only if the sequences of all requests that
read or lend fit into the pool together; until then it waits here, first come, first served, and behind older requests
that wait in the engine. So every request that began to read gets its blocks: from free ones, or from sequences that
lend nothing, which are preempted and recomputed.

**Visits.** A request to which a walk returns thinks and lends once in each visit. Each reply is a sequence of its own,
whose prompt is all that was read and written before: the prefix cache has it. What a visit lends ends with the next.

**Recovery.** Thoughts are journalled and resumed like any reply. Contexts are prefilled again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from segue.engines.autoregressive.contexts.contract import Contexts, Reading, ReadsContexts, View
from segue.engines.autoregressive.contract import Fed, Then
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageRequest
from segue.engines.entries import as_error
from segue.kernels.kv.store import KVStore
from segue.messages.errors import InvalidRequest, SegueError, TooLong
from segue.messages.sampling import FALLBACK, turn_seed


@dataclass(slots=True)
class _Entry:
    """One request from `add` until its blocks are released."""

    request: StageRequest
    reading: Reading
    visit: int = -1
    """The visit that has begun."""
    thinking: str = ""
    """The engine's request for its thoughts, while they are drawn."""
    thoughts: list[int] = field(default_factory=list)
    """Of this visit."""
    before: int = 0
    """Units of earlier visits."""
    end: TokenOutput | None = None
    """The last output of its thoughts: they have ended."""
    over: bool = False
    """Its last output was made: it only lends."""
    contexts: Contexts | None = None
    """Set when it waits to read, reads, or lends."""
    need: int = 0
    """Blocks of its sequences."""
    keys: list[str] = field(default_factory=list)
    """The engine's requests for its sequences, once it reads."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Fields of its output that count what was read, if it has no thoughts."""
    lease: int | None = None
    """Set when it lends."""


class ContextEngine:
    """`segue.engines.contract.Engine` and `LendsContexts` around an `AutoregressiveEngine`: serves its requests, and
    those that read contexts."""

    def __init__(self, engine: AutoregressiveEngine, model: ReadsContexts) -> None:
        self._engine = engine
        self._model = model
        self._entries: dict[str, _Entry] = {}
        """In order of arrival."""
        self._owner: dict[str, str] = {}
        """Request of the engine → the request that it is a sequence of."""
        self._leases: dict[int, _Entry] = {}
        self._numbers = itertools.count()
        self._closed: list[TokenOutput] = []
        """Last outputs of requests that failed or were closed between two steps."""
        self.audit = engine.audit
        self.warm_up = engine.warm_up

    # --- for the engine that reads the contexts ----------------------------------------------------------------------

    @property
    def store(self) -> KVStore:
        """Keys and values."""
        return self._engine.resources.store

    def blocks(self, lease: int, view: View) -> Sequence[int]:
        """The blocks of a view, until the lease ends. Raises `KeyError` after it."""
        entry = self._leases[lease]
        if not view.length:
            return ()
        blocks = self._engine.lent(entry.keys[view.sequence])
        assert blocks is not None, "lent blocks were taken"
        return blocks[: -(-view.length // self.store.block_size)]

    def release(self, lease: int) -> None:
        """End a lease and free its blocks. One that has ended is ignored."""
        if lease in self._leases:
            entry = self._leases[lease]
            self._give_back(entry)
            if entry.over:
                self._leave(entry.request.request_id)

    # --- the contract of an engine -----------------------------------------------------------------------------------

    def add(self, request: StageRequest) -> None:
        """Raises `InvalidRequest` if the stage model rejects it or its id is in use."""
        reading = self._model.reading(request)
        if reading is None:
            self._engine.add(request)
            return
        old = self._entries.get(request.request_id)
        if old is not None and not old.over:
            raise InvalidRequest(f"request {request.request_id!r} is running already", field="request_id")
        self._leave(request.request_id)  # of an earlier attempt, which is done here
        self._entries[request.request_id] = _Entry(request, reading)

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        entry = self._entries.get(request_id)
        if entry is None:
            self._engine.feed(request_id, upstream, payload, final=final)
            return
        try:
            if entry.reading.feed(upstream, payload, final=final) and not entry.request.returns:
                self._begin(entry)
        except SegueError as error:
            self._fail(request_id, error)

    def go_on(self, request_id: str) -> None:
        """As `Holds`: all input of this visit has been fed."""
        entry = self._entries.get(request_id)
        if entry is None:
            self._engine.go_on(request_id)
            return
        try:
            self._begin(entry)
        except Exception as error:  # only this request fails
            self._fail(request_id, error)

    def close(self, request_id: str) -> None:
        """As `Holds`: there is no further visit."""
        entry = self._entries.get(request_id)
        if entry is None:
            self._engine.close(request_id)
            return
        self._closed.append(self._last(entry))
        if entry.lease is None:
            self._leave(request_id)

    def cancel(self, request_id: str) -> None:
        """Drop a request, also one that has ended here and still lends."""
        self._leave(request_id)
        self._engine.cancel(request_id)
        self._closed = [output for output in self._closed if output.request_id != request_id]

    def pause(self, request_id: str) -> None:
        self._engine.pause(self._inner(request_id))

    def resume(self, request_id: str) -> None:
        self._engine.resume(self._inner(request_id))

    def backlog(self, request_id: str) -> int:
        return 0 if request_id in self._entries else self._engine.backlog(request_id)

    def has_work(self) -> bool:
        return bool(self._closed) or self._engine.has_work() or self._next() is not None

    def step(self) -> list[TokenOutput]:
        """Let waiting requests begin to read, run the engine's step, and return views that are complete."""
        while (entry := self._next()) is not None:
            try:
                self._read(entry)
            except Exception as error:  # only this request fails
                self._fail(entry.request.request_id, error)
        outputs = [kept for output in self._engine.step() if (kept := self._taken(output)) is not None]
        outputs += [self._lent(entry) for entry in self._entries.values() if self._complete(entry)]
        closed, self._closed = self._closed, []
        return closed + outputs

    def stats(self) -> dict[str, float]:
        """As the engine's, and requests that read or lend."""
        return {
            **self._engine.stats(),
            "contexts_waiting": sum(one.contexts is not None and not one.keys for one in self._entries.values()),
            "contexts_lent": len(self._leases),
        }

    # --- a request that reads ----------------------------------------------------------------------------------------

    def _begin(self, entry: _Entry) -> None:
        """All input of a visit has arrived: think, or wait to read."""
        if entry.lease is not None:
            self._give_back(entry)  # what followed from it has come back
        entry.before, entry.thoughts, entry.end = entry.before + len(entry.thoughts), [], None
        entry.visit += 1
        entry.reading.visited()
        prompt = entry.reading.thoughts()
        if prompt is None:
            self._plan(entry)
            return
        request, visit = entry.request, entry.visit
        if request.returns:
            request = replace(
                request,
                request_id=f"{request.request_id}\0text {visit}",
                seed=turn_seed(request.seed, visit),
                resume=request.resume[
                    entry.before : request.turns[visit].units if visit < len(request.turns) else None
                ],
                turns=[],
                returns=False,
            )
        entry.thinking = request.request_id
        self._owner[entry.thinking] = entry.request.request_id
        self._engine.add(request)
        self._engine.give(entry.thinking, Fed(prompt=prompt))

    def _inner(self, request_id: str) -> str:
        """The engine's request for what a request draws."""
        entry = self._entries.get(request_id)
        return request_id if entry is None else entry.thinking

    def _plan(self, entry: _Entry) -> None:
        """Determine what it reads. Raises `TooLong` if that does not fit into the cache."""
        limits, total = self._engine.resources.scheduler.limits, self._engine.resources.pool.total
        contexts = entry.reading.contexts(entry.thoughts)
        entry.contexts = contexts if contexts.prompts else None
        lengths = [len(prompt.token_ids) for prompt in contexts.prompts]
        entry.need = sum(map(limits.need, lengths))
        if entry.need > total:
            raise TooLong(
                f"the contexts of an image have {sum(lengths)} tokens in all, more than the {total} blocks of "
                f"{limits.block_size} tokens of stage {entry.request.stage!r} hold",
                field="messages",
            )

    def _next(self) -> _Entry | None:
        """The oldest request that waits to read, if it can begin."""
        entry = next((one for one in self._entries.values() if one.contexts is not None and not one.keys), None)
        if entry is None:
            return None
        taken = sum(one.need for one in self._entries.values() if one.keys)
        if taken + entry.need > self._engine.resources.pool.total:
            return None
        waiting = (
            scheduled
            for scheduled in self._engine.resources.scheduler.waiting
            if scheduled.runnable and not scheduled.lent
        )
        if any(scheduled.rank[1] < entry.request.arrival for scheduled in waiting):
            return None
        return entry

    def _read(self, entry: _Entry) -> None:
        assert entry.contexts is not None
        request_id = entry.request.request_id
        for number, prompt in enumerate(entry.contexts.prompts):
            key = f"{request_id}\0context {number}"
            # drawn by nobody, so it has neither sampling parameters nor receivers
            plain = replace(
                entry.request,
                request_id=key,
                sampling=FALLBACK,
                downstreams=frozenset(),
                to_client=frozenset(),
                resume=[],
                resume_others=[],
                turns=[],
                returns=False,
            )
            self._engine.add(plain)
            entry.keys.append(key)
            self._owner[key] = request_id
            self._engine.give(key, Fed(prompt=prompt, then=Then.LEND))

    def _taken(self, output: TokenOutput) -> TokenOutput | None:
        """An output of the engine as one of this stage; None if it is only of use here."""
        if (owner := self._owner.get(output.request_id)) is None:
            return output
        entry = self._entries[owner]
        if output.request_id != entry.thinking:
            if output.error is not None:
                self._fail(owner, output.error)
            elif output.request_id == entry.keys[0]:
                entry.counts = {
                    "prompt_tokens": output.prompt_tokens - 1,  # the last only follows
                    "cached_tokens": output.cached_tokens,
                    "modality_tokens": output.modality_tokens,
                }
            return None
        output.request_id = owner
        if output.error is not None:
            self._leave(owner)
            return output
        entry.thoughts += output.token_ids
        output.first_index += entry.before
        if output.prompt_tokens and entry.before:  # what it wrote itself was not sent to it
            output.prompt_tokens -= entry.before
            output.modality_tokens = {**output.modality_tokens, "text": output.modality_tokens["text"] - entry.before}
        if output.finished:
            output.finished, entry.end = False, output
            del self._owner[entry.thinking]
            entry.thinking = ""
            try:
                self._plan(entry)
            except Exception as error:  # as above
                self._fail(owner, error)
            else:
                output.turn_ended = entry.request.returns and not entry.need
        return output

    def _complete(self, entry: _Entry) -> bool:
        """Whether all that it reads has been computed, and its views have not been sent."""
        if entry.lease is not None or not entry.keys:
            return False
        return all(self._engine.lent(key) is not None for key in entry.keys)

    def _lent(self, entry: _Entry) -> TokenOutput:
        """The last output of a request, or of a visit: its views."""
        assert entry.contexts is not None
        entry.lease = next(self._numbers)
        self._leases[entry.lease] = entry
        output = self._ended(entry)
        output.payload = {
            "lease": entry.lease,
            "views": [[view.sequence, view.length, view.position] for view in entry.contexts.views],
            **entry.contexts.settings,
        }
        output.turn_ended, output.finished = entry.request.returns, not entry.request.returns
        entry.over = output.finished
        return output

    def _last(self, entry: _Entry) -> TokenOutput:
        """The last output of a request that is closed after a visit."""
        output = self._ended(entry)
        output.finished = entry.over = True
        return output

    def _ended(self, entry: _Entry) -> TokenOutput:
        end = entry.end
        return TokenOutput(
            entry.request.request_id,
            first_index=entry.before + len(entry.thoughts),
            finish_reason="stop" if end is None else end.finish_reason,
            stop_reason=None if end is None else end.stop_reason,
            cumulative_logprob=None if end is None else end.cumulative_logprob,
            **({} if end is not None else entry.counts),
        )

    def _give_back(self, entry: _Entry) -> None:
        """Free the blocks that a request reads or lends."""
        if entry.lease is not None:
            del self._leases[entry.lease]
        for key in entry.keys:
            del self._owner[key]
            self._engine.cancel(key)
        entry.lease, entry.keys, entry.contexts, entry.need = None, [], None, 0

    def _leave(self, request_id: str) -> None:
        """Forget a request that reads or lends, and free its blocks."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._give_back(entry)
        if entry.thinking:
            del self._owner[entry.thinking]
            self._engine.cancel(entry.thinking)

    def _fail(self, request_id: str, error: Exception) -> None:
        """Report a failure with the next outputs."""
        self._leave(request_id)
        self._closed.append(TokenOutput(request_id, error=as_error(error)))
