"""The module engine: batched one-shot calls (encoders, decoders, processors, vocoders), by priority, then by urgency.

A request is a queue of `Work` items made by its stage model. One step takes the first runnable item (lowest priority
number, then most urgent), fills the call with the next items of the same bucket, runs it, and emits one output per
item. Items without playback and the first item of each audio stream are the most urgent, the oldest first.
Later items of streams follow in the order in which playback reaches them, if each plays without a pause from its first
output on. First items share calls only with first items, so that no first audio waits for later items.
Items of one request run and are emitted in the order they were made; `Work.ordered` ones, which need the state that
their predecessors left (a streaming vocoder), are never in a call with them.

A request ends with its `Work.last` item. A stage model must make one for every request, even if nothing is left to do
(a talker that made no codes): the last item is then an empty one. A request whose upstreams are all final but that has
no last item fails, so that no client waits forever."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
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
    max_first: int | None = None
    """Items per call if each is the first of an audio stream. On a CPU a call of two takes nearly as long as two calls:
    with 1, the first listener does not wait for the second's. None: `max_batch`."""
    min_batch: int = 1
    """Items that a call waits for, unless it is the first of an audio stream."""
    batch_wait: float = 0.05
    """Most seconds that an item waits for `min_batch`."""

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.max_batch), ("max_cost", self.max_cost), ("max_first", self.max_first)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", field=name)
        if not 1 <= self.min_batch <= self.max_batch:
            raise ConfigError(
                f"min_batch is {self.min_batch}; it must be from 1 to max_batch, {self.max_batch}", field="min_batch"
            )


@dataclass(frozen=True, slots=True)
class _Queued:
    """An item that is ready."""

    age: int
    """Number of items made before it, over all requests."""
    since: float
    work: Work


@dataclass(slots=True)
class _Entry(Entry):
    """One request in the engine."""

    queue: deque[_Queued] = field(default_factory=deque)
    """Ready items in the order they must run."""
    complete: bool = False
    """Its last item has been made."""
    made: int = 0
    ran: int = 0
    """Number of items made and run so far."""
    unused: deque[int] = field(default_factory=deque)
    """For each waiting chunk that made items: `made` after it."""
    playing_since: float | None = None
    """When its first item that is played was emitted."""


class ModuleEngine:
    """`segue.engines.contract.Engine` over a `ModuleModel`."""

    def __init__(
        self,
        model: ModuleModel,
        config: ModuleConfig | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called from another thread when an item has waited long enough for others to join its call."""
        self._model = model
        self._config = config or ModuleConfig()
        self._wake = wake
        self._clock = clock
        self._timer: threading.Timer | None = None
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
        return self._entries.any_failed or self._waits() == 0

    def step(self) -> list[StageOutput]:
        outputs = self._entries.take_failed()
        batch = [] if self._waits() else self.schedule()
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

        The first item by (priority, urgency) is always in it, so within a priority no bucket and no request starves: an
        item waits for no more calls than there were items before it, first ones of audio streams, and items of streams
        that are behind their playback.
        """
        now = self._clock()
        ready = sorted(
            (
                (entry.request.priority, *_urgency(entry, item, now), item.work)
                for entry in self._entries.values()
                if not entry.paused
                for item in _ready(entry.queue)
            ),
            key=lambda item: item[:-1],
        )
        batch: list[Work] = []
        limit = self._config.max_batch
        passed: set[str] = set()
        """Requests with a skipped item: their later items must not overtake it."""
        cost = 0
        for *_, work in ready:
            if len(batch) == limit:
                break
            if work.request_id in passed:
                continue
            if not batch and _is_first(work):
                limit = self._config.max_first or limit
            if batch and (not _together(batch[0], work) or self._too_dear(cost + work.cost)):
                passed.add(work.request_id)
                continue
            batch.append(work)
            cost += work.cost
        return batch

    def _waits(self) -> float | None:
        """Seconds for which the next call waits for more items; None: there are none at all."""
        ready = [item for entry in self._entries.values() if not entry.paused for item in _ready(entry.queue)]
        if not ready:
            return None
        if len(ready) >= self._config.min_batch or any(_is_first(item.work) for item in ready):
            return 0
        left = min(item.since for item in ready) + self._config.batch_wait - self._clock()
        if left <= 0:
            return 0
        if self._timer is None or self._timer.finished.is_set():
            self._timer = threading.Timer(left, self._wake)
            self._timer.daemon = True
            self._timer.start()
        return left

    def _too_dear(self, cost: int) -> bool:
        return self._config.max_cost is not None and cost > self._config.max_cost

    def _queue(self, request_id: str, entry: _Entry, works: list[Work]) -> None:
        for work in works:
            assert work.request_id == request_id, "a stage model made work for another request"
            assert not entry.complete, "a stage model made work after the last item"
            entry.queue.append(_Queued(next(self._ages), self._clock(), work))
            entry.made += 1
            entry.complete = work.last
        if not entry.open_upstreams and not entry.complete:
            error = StageFailed(f"all input of request {request_id!r} arrived, but its stage model made no last item")
            self._entries.fail_later(request_id, error)

    def _run(self, batch: list[Work]) -> list[Result]:
        if not batch:
            return []
        try:
            self._calls += 1
            results = self._model.run(batch)
            if len(results) != len(batch):
                raise StageFailed(f"the stage model returned {len(results)} results for {len(batch)} items")
            return results
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

    def _emit(self, work: Work, result: Result) -> StageOutput:
        if result.error is not None:
            return self._entries.fail(work.request_id, result.error)
        if _is_first(work):
            self._entries[work.request_id].playing_since = self._clock()
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


def _is_first(work: Work) -> bool:
    """Whether it is the first item of an audio stream."""
    return work.played_at == 0


def _together(first: Work, work: Work) -> bool:
    """Whether both may share a call."""
    return work.bucket == first.bucket and _is_first(work) == _is_first(first)


def _urgency(entry: _Entry, item: _Queued, now: float) -> tuple[float, int]:
    """Sorts items of one priority: (when a listener needs it, age). -inf: as soon as possible."""
    if not item.work.played_at:
        return -math.inf, item.age
    began = now if entry.playing_since is None else entry.playing_since
    return began + item.work.played_at, item.age


def _ready(queue: deque[_Queued]) -> Iterator[_Queued]:
    """Items of a request that may share a call: its first, and those after it that do not need its state."""
    for index, item in enumerate(queue):
        if index and item.work.ordered:
            return
        yield item
