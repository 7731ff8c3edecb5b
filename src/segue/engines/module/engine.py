"""The module engine: batched one-shot calls (encoders, decoders, processors, vocoders), by priority, then by age.

A request is a queue of `Work` items made by its stage model. One step takes the first runnable item (lowest priority
number, then oldest), fills the call with the next items of the same bucket, runs it, and emits one output per item.
Items of one request run and are emitted in the order they were made; `Work.ordered` ones, which need the state that
their predecessors left (a streaming vocoder), are never in a call with them.

A request ends with its `Work.last` item. A stage model must make one for every request, even if nothing is left to do
(a talker that made no codes): the last item is then an empty one. A request whose upstreams are all final but that has
no last item fails, so that no client waits forever."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.engines.entries import Entries, Entry, as_error
from segue.engines.module.contract import ModuleModel, Result, Work
from segue.kernels.device import end_where_lost, give_back, out_of_memory
from segue.messages.errors import ConfigError, StageFailed


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """Limits of one call."""

    max_batch: int = 8
    """Items per call."""
    max_cost: int | None = None
    """Sum of `Work.cost` per call; an item that costs more runs alone. None: no limit."""

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.max_batch), ("max_cost", self.max_cost)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", field=name)


@dataclass(slots=True)
class _Entry(Entry):
    """One request in the engine."""

    queue: deque[tuple[int, Work]] = field(default_factory=deque)
    """(age, item): ready items in the order they must run."""
    complete: bool = False
    """Its last item has been made."""
    made: int = 0
    ran: int = 0
    """Number of items made and run so far."""
    unused: deque[int] = field(default_factory=deque)
    """For each waiting chunk that made items: `made` after it."""


class ModuleEngine:
    """`segue.engines.contract.Engine` over a `ModuleModel`."""

    def __init__(self, model: ModuleModel, config: ModuleConfig | None = None) -> None:
        self._model = model
        self._config = config or ModuleConfig()
        self._entries: Entries[_Entry] = Entries(model.end)
        self._ages = itertools.count()
        self._last_batch = 0
        self._calls = 0
        self._retries = 0

    def warm_up(self) -> None:
        """Run the stage model's own warm-up."""
        self._model.warm_up()

    def add(self, request: StageRequest) -> None:
        self._entries.expect_new(request)
        state, works = self._model.begin(request)
        entry = _Entry(request, state, set(request.upstreams))
        self._entries.add(entry)
        self._queue(request.request_id, entry, works)

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        entry = self._entries.get(request_id)
        if entry is None:
            return
        try:
            works = self._model.feed(entry.state, upstream, payload, final=final)
        except Exception as error:  # the stage fails the request for any error of its model code
            self._entries.fail_later(request_id, error)
            return
        if final:
            entry.open_upstreams.discard(upstream)
        self._queue(request_id, entry, works)
        if works:
            entry.unused.append(entry.made)

    def cancel(self, request_id: str) -> None:
        self._entries.cancel(request_id)

    def pause(self, request_id: str) -> None:
        self._entries.pause(request_id)

    def resume(self, request_id: str) -> None:
        self._entries.resume(request_id)

    def backlog(self, request_id: str) -> int:
        entry = self._entries.get(request_id)
        if entry is None:
            return 0
        while entry.unused and entry.unused[0] <= entry.ran:
            entry.unused.popleft()
        return len(entry.unused)

    def has_work(self) -> bool:
        return self._entries.any_failed or any(entry.queue and not entry.paused for entry in self._entries.values())

    def step(self) -> list[StageOutput]:
        outputs = self._entries.take_failed()
        batch = self.schedule()
        for work in batch:
            entry = self._entries[work.request_id]
            entry.queue.popleft()
            entry.ran += 1
        for work, result in zip(batch, self._run(batch), strict=True):
            if work.request_id in self._entries:  # not failed by an earlier item of the same call
                outputs.append(self._emit(work, result))
        self._last_batch = len(batch)
        return outputs

    def stats(self) -> dict[str, float]:
        queued = [len(entry.queue) for entry in self._entries.values()]
        return {
            "waiting": float(sum(queued)),
            "running": float(len(self._entries)),
            "batch": float(self._last_batch),
            "calls_total": float(self._calls),
            "retries_total": float(self._retries),
        }

    def schedule(self) -> list[Work]:
        """Choose the items of the next call; changes nothing.

        The first item by (priority, age) is always in it, so within a priority no bucket and no request starves: an
        item waits for no more calls than there were items before it.
        """
        ready = sorted(
            (
                (entry.request.priority, age, work)
                for entry in self._entries.values()
                if not entry.paused
                for age, work in _ready(entry.queue)
            ),
            key=lambda item: item[:2],
        )
        batch: list[Work] = []
        passed: set[str] = set()
        """Requests with a skipped item: their later items must not overtake it."""
        cost = 0
        for _, _, work in ready:
            if len(batch) == self._config.max_batch:
                break
            if work.request_id in passed:
                continue
            if batch and (work.bucket != batch[0].bucket or self._too_dear(cost + work.cost)):
                passed.add(work.request_id)
                continue
            batch.append(work)
            cost += work.cost
        return batch

    def _too_dear(self, cost: int) -> bool:
        return self._config.max_cost is not None and cost > self._config.max_cost

    def _queue(self, request_id: str, entry: _Entry, works: list[Work]) -> None:
        for work in works:
            assert work.request_id == request_id, "a stage model made work for another request"
            assert not entry.complete, "a stage model made work after the last item"
            entry.queue.append((next(self._ages), work))
            entry.made += 1
            entry.complete = work.last
        if not entry.open_upstreams and not entry.complete:
            error = StageFailed(f"all input of request {request_id!r} arrived, but its stage model made no last item")
            self._entries.fail_later(request_id, error)

    def _run(self, batch: list[Work]) -> list[Result]:
        if not batch:
            return []
        try:
            return self._call(batch)
        except Exception as error:
            end_where_lost(error)
            if len(batch) == 1:
                return [Result(error=as_error(error))]
            lacking = out_of_memory(error)
        if lacking:
            give_back()
        # Some item fails the call for all: run one by one, only that one fails.
        self._retries += 1
        return [result for work in batch for result in self._run([work])]

    def _call(self, batch: list[Work]) -> list[Result]:
        self._calls += 1
        results = self._model.run(batch)
        if len(results) != len(batch):
            raise StageFailed(f"the stage model returned {len(results)} results for {len(batch)} items")
        return results

    def _emit(self, work: Work, result: Result) -> StageOutput:
        if result.error is not None:
            return self._entries.fail(work.request_id, result.error)
        if work.last:
            self._entries.leave(work.request_id)
        return StageOutput(
            work.request_id,
            payload=result.payload,
            progress=result.progress,
            finished=work.last,
            finish_reason="stop" if work.last else "",
            prompt_tokens=result.prompt_tokens,
            modality_tokens=result.modality_tokens or ({"text": result.prompt_tokens} if result.prompt_tokens else {}),
        )


def _ready(queue: deque[tuple[int, Work]]) -> Iterator[tuple[int, Work]]:
    """Items of a request that may share a call: its first, and those after it that do not need its state."""
    for index, item in enumerate(queue):
        if index and item[1].ordered:
            return
        yield item
