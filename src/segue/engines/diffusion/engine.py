"""The diffusion engine: one step is one call of the network over rows of many requests, each at its own step.

    add ─▶ feed* ─▶ samples            the stage model makes them when all conditions of a request have arrived
    step:  choose samples ─▶ rows ─▶ predict ─▶ per sample: combine, its scheduler's step
    a finished sample leaves as a payload; the request is finished with its last sample

`segue.engines.diffusion.batch` decides which samples are in a step. A sample's result does not depend on the other
samples in its calls: it has its own scheduler, noise and guidance, and rows do not see each other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.engines.diffusion.batch import Candidate, CostTable, choose, measure
from segue.engines.diffusion.contract import DiffusionModel, Row, Sample
from segue.engines.diffusion.memory import Room
from segue.engines.diffusion.sharing import Sharing, shared_failure
from segue.engines.diffusion.step_caches import StepCaches
from segue.engines.entries import Entries, Entry
from segue.kernels.device import end_where_lost, out_of_memory
from segue.messages.errors import ConfigError, StageFailed
from segue.parallel.group import ReplicaBroken
from segue.parallel.ranks import ALONE, Ranks

TRIAL_SECONDS = {"cpu": 1.0}
"""Time that the warm-up spends measuring calls, by kind of device. A restarted worker spends it again."""
_TRIAL_SECONDS = 10.0
_UNCOUNTED = 2
"""Calls of each kind before the measured ones. The third may be recorded, and later ones are replayed:
`segue.kernels.graphs.replay`."""
_CALLS = 3
"""Minimum number of one-row calls for measuring a size."""
_NEXT, _OVER = 0, -1
"""What rank 0 says instead of the rows of a trial: the next sample comes, or none."""
_EXPLORE = 128
"""Every this many calls, a batch larger than found worth it is tried, because the measurement may have been a fluke."""


@dataclass(frozen=True, slots=True)
class DiffusionConfig:
    """Limits of the engine."""

    max_batch: int = 16
    """Rows per call; a single sample with more runs alone."""
    patience: int = 64
    """Steps a sample may be passed over before it leads. Simulated as in `batch.GAIN` at eight tenths of the capacity,
    relative to first come, first served: 8 gives 0.54 of its mean completion time and 1.4 of the 99th percentile,
    16 gives 0.47 and 1.2, 64 gives 0.44 and 1.1, and more changes nothing."""
    memory_bytes: int | None = None
    """The stage's memory for weights and activations; None: unknown, so no request is refused for it."""

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.max_batch), ("patience", self.patience)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", field=name)


@dataclass(slots=True)
class _Running:
    """A sample in the engine."""

    sample: Sample
    arrival: int
    previews: list[int]
    """Numbers of the calls after which a preview is due; preview k is entry k."""
    branches: Sequence[int] = ()
    """Branches of its next call; read from the stage model when a step is chosen."""
    passed: int = 0

    @property
    def name(self) -> tuple[str, int]:
        """Unique in the engine."""
        return self.sample.request_id, self.sample.index


@dataclass(slots=True)
class _Entry(Entry):
    """One request in the engine."""

    running: list[_Running] = field(default_factory=list)
    """Samples that are not finished."""
    made: bool = False
    """Its samples have been made."""


class DiffusionEngine:
    """`segue.engines.contract.Engine` over a `DiffusionModel`."""

    def __init__(
        self,
        model: DiffusionModel,
        config: DiffusionConfig | None = None,
        sharing: Sharing | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`sharing`: with `ranks`, those that run this engine together."""
        self._model = model
        self._sharing = sharing
        self._ranks = ranks
        self._config = config or DiffusionConfig()
        self._entries: Entries[_Entry] = Entries(model.end)
        self._arrivals = itertools.count()
        self.costs = CostTable()
        self._room = Room(model, self._config.memory_bytes)
        self._caches = StepCaches(model)
        self._limit = 0
        """Row limit of the last call."""
        self._last_batch = 0
        self._calls = 0
        self._rows = 0
        self._retries = 0

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the stage model's own warm-up, then measure calls of made-up samples to fill `costs`."""
        self._model.warm_up()
        try:
            if self._ranks.first:
                self._measure()
                self._ranks.same(lambda: _OVER, int)
            else:
                self._follow_trials()
        except ReplicaBroken as broken:
            raise ConfigError(f"the ranks of this stage cannot run the warm-up together: {broken}") from broken

    def _measure(self) -> None:
        """Make calls of the stage model's trials, which the other ranks follow."""
        end: float | None = None
        for number, sample in enumerate(self._model.trials()):
            if number:
                self._ranks.same(lambda: _NEXT, int)
            if end is None:
                end = time.monotonic() + TRIAL_SECONDS.get(sample.latents.device.type, _TRIAL_SECONDS)
            left = end - time.monotonic()
            if left <= 0 or (self.costs.per_row and _CALLS * self.costs.of(sample.tokens, 1) > left):
                break
            call = partial(self._announced_trial, sample)
            try:
                self._room.measure(sample, call)
                most = min(self._config.max_batch, self._room.rows(sample))
                measure(self.costs, sample.tokens, most, call, left, time.monotonic, _UNCOUNTED)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                self._room.too_large(sample, 1)
                break

    def _follow_trials(self) -> None:
        """Make the trial calls that rank 0 makes."""
        trials = iter(self._model.trials())
        sample = next(trials, None)
        while (rows := self._ranks.same(int, int)) != _OVER:
            if rows == _NEXT:
                sample = next(trials)
                continue
            assert sample is not None
            try:
                self._trial(sample, rows)
            except Exception as error:  # rank 0's call fails alike, and it says how it goes on
                if not out_of_memory(error):
                    raise

    def _announced_trial(self, sample: Sample, rows: int) -> float:
        return self._trial(sample, self._ranks.same(lambda: rows, int))

    def _trial(self, sample: Sample, rows: int) -> float:
        """Seconds of a call of `rows` rows like this one."""
        start = time.perf_counter()
        self._call([Row(sample, 0)] * rows)
        if sample.latents.device.type == "cuda":
            torch.cuda.synchronize(sample.latents.device)
        return time.perf_counter() - start

    def add(self, request: StageRequest) -> None:
        self._entries.expect_new(request)
        self._entries.add(_Entry(request, self._model.begin(request), set(request.upstreams)))

    @torch.inference_mode()
    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        entry = self._entries.get(request_id)
        if entry is None:
            return
        samples: list[Sample] = []
        failure: Exception | None = None
        try:
            samples = self._model.feed(entry.state, upstream, payload, final=final)
            if samples and self._ranks.first:
                failure = self._room.refusal(samples[0])
        except Exception as error:  # the stage fails the request for any error of its model code
            failure = error
        failure = shared_failure(self._ranks, failure, f"prepare request {request_id}")
        if failure is not None:
            self._entries.fail_later(request_id, failure)
            return
        if final:
            entry.open_upstreams.discard(upstream)
        for sample in samples:
            due = preview_calls(len(sample.timesteps), sample.params.partial_images)
            entry.running.append(_Running(sample, next(self._arrivals), due))
        entry.made = entry.made or bool(samples)
        if not entry.open_upstreams and not entry.made:
            nothing = StageFailed(f"all input of request {request_id!r} arrived, but its stage model made no samples")
            self._entries.fail_later(request_id, nothing)

    def cancel(self, request_id: str) -> None:
        self._entries.cancel(request_id)

    def pause(self, request_id: str) -> None:
        self._entries.pause(request_id)

    def resume(self, request_id: str) -> None:
        self._entries.resume(request_id)

    def backlog(self, request_id: str) -> int:
        """Always 0: conditions are kept, not queued."""
        return 0

    def has_work(self) -> bool:
        return self._entries.any_failed or any(entry.running and not entry.paused for entry in self._entries.values())

    def step(self) -> list[StageOutput]:
        outputs = self._entries.take_failed()
        batch = self._schedule()
        self._last_batch = 0
        if batch:
            outputs += self._advance(batch)
        return outputs

    def stats(self) -> dict[str, float]:
        samples = sum(len(entry.running) for entry in self._entries.values())
        return {
            "waiting": float(sum(not entry.made for entry in self._entries.values())),
            "running": float(samples),
            "batch": float(self._last_batch),
            "calls_total": float(self._calls),
            "rows_total": float(self._rows),
            "retries_total": float(self._retries),
            "batch_limit": float(self._limit),
        }

    def shared_state(self) -> dict[str, Any]:
        """The state that all ranks must have in common between two steps, by name."""
        running = [running for entry in self._entries.values() for running in entry.running]
        return {
            "requests": [(name, entry.paused, entry.made) for name, entry in self._entries.items()],
            "samples": [(one.sample.request_id, one.sample.index) for one in running],
            "steps": [one.sample.step for one in running],
        }

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _schedule(self) -> list[_Running]:
        """Choose the samples of the next step, and count how often the others are passed over. With several ranks, rank
        0 chooses, by the costs that it measured."""
        ready = [(running, entry) for entry in self._entries.values() if not entry.paused for running in entry.running]
        for entry in self._entries.values():
            for running in entry.running:
                running.branches = self._model.branches(running.sample)
        by_name = {running.name: running for running, _ in ready}
        names = self._ranks.same(lambda: [one.name for one in self._choose(ready)], list[tuple[str, int]])
        chosen = [by_name[name] for name in names]
        for running, _ in ready:
            running.passed += 1
        for running in chosen:
            running.passed = 0
        return chosen

    def _choose(self, ready: Sequence[tuple[_Running, _Entry]]) -> list[_Running]:
        # a request is done when all its samples are, so its work is the sum of theirs
        work = {name: sum(map(self._work, entry.running)) for name, entry in self._entries.items()}
        by_candidate = {
            self._candidate(running, entry.request.priority, work[running.sample.request_id]): running
            for running, entry in ready
        }

        def max_rows(leader: Candidate) -> int:
            sample = by_candidate[leader].sample
            sharing = (one.sample for candidate, one in by_candidate.items() if candidate.bucket == leader.bucket)
            largest = max(sharing, key=lambda one: one.tokens)  # rows of one bucket may differ in size
            most = min(self._config.max_batch, self._room.rows(largest))
            self._limit = self.costs.rows_worth(sample.tokens, most, explore=self._calls % _EXPLORE == _EXPLORE - 1)
            return self._limit

        return [by_candidate[candidate] for candidate in choose(list(by_candidate), max_rows, self._config.patience)]

    def _work(self, running: _Running) -> float:
        """Approximate seconds of calls that a sample still needs."""
        sample = running.sample
        return sample.remaining * self.costs.of(sample.tokens, len(running.branches))

    def _candidate(self, running: _Running, priority: int, work: float) -> Candidate:
        sample = running.sample
        return Candidate(
            bucket=self._caches.bucket(sample),
            rows=self._caches.rows(sample, running.branches),
            work=work,
            priority=priority,
            arrival=running.arrival,
            passed=running.passed,
        )

    @torch.inference_mode()
    def _advance(self, batch: Sequence[_Running]) -> list[StageOutput]:
        rows = [Row(running.sample, branch) for running in batch for branch in running.branches]
        answers = iter(self._caches.answers(rows, self._computed))
        outputs: list[StageOutput] = []
        for running in batch:
            own = list(itertools.islice(answers, len(running.branches)))
            if running.sample.request_id not in self._entries:
                continue  # another sample of the same call has failed the request
            try:
                outputs += self._stepped(running, own)
            except Exception as error:
                outputs.append(self._entries.fail(running.sample.request_id, error))
        return outputs

    def _computed(self, rows: Sequence[Row]) -> list[torch.Tensor | Exception]:
        self._last_batch = len(rows)
        return self._predict(rows)

    def _call(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """One call of the network, by all ranks."""
        return self._compute(rows) if self._sharing is None else self._sharing.predict(rows, self._compute)

    def _compute(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """This rank's network."""
        with self._model.during(rows):
            return self._caches.predict(rows)

    def _predict(self, rows: Sequence[Row], *, again: bool = False) -> list[torch.Tensor | Exception]:
        """The network's prediction for each row, or its error. A failed call is repeated in halves, so that one that is
        too large for the memory succeeds, and otherwise only the faulty row fails. A single row that runs out of memory
        is tried once more (`again`)."""
        self._calls += 1
        self._rows += len(rows)
        try:
            start = time.perf_counter()
            answers: list[torch.Tensor | Exception] = list(self._call(rows))
            seconds = time.perf_counter() - start
            if len(answers) != len(rows):
                raise StageFailed(f"the stage model gave {len(answers)} predictions for {len(rows)} rows")
        except Exception as error:
            end_where_lost(error)
            lacking = out_of_memory(error)
            # the traceback keeps the call's tensors alive
            failure = error.with_traceback(None) if lacking else error
        else:
            self._room.fitted(rows[0].sample)
            # on other devices the call has only been dispatched
            alike = len({row.sample.tokens for row in rows}) == 1
            if alike and rows[0].sample.latents.device.type == "cpu" and self._caches.measures(rows):
                self.costs.enter(rows[0].sample.tokens, len(rows), seconds)
            return answers
        if lacking:
            self._room.too_large(rows[0].sample, len(rows))
        if len(rows) == 1 and (again or not lacking):
            return [failure]
        self._retries += 1
        if len(rows) == 1:  # memory left behind by earlier calls has been freed
            return self._predict(rows, again=True)
        middle = (len(rows) + 1) // 2
        return self._predict(rows[:middle]) + self._predict(rows[middle:])

    def _stepped(self, running: _Running, answers: Sequence[torch.Tensor | Exception]) -> list[StageOutput]:
        """Advance a sample by one call of the network. Raises the error that fails its request."""
        sample = running.sample
        predictions: list[torch.Tensor] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._room.failure(sample) if out_of_memory(answer) else answer
            predictions.append(answer)
        prediction = self._model.combine(sample, predictions)
        outputs: list[StageOutput] = []
        if sample.step + 1 in running.previews:
            number = running.previews.index(sample.step + 1)
            shown = {**self._model.preview(sample, prediction), "partial": number}
            outputs.append(StageOutput(sample.request_id, index=sample.index, payload=shown))
        [sample.latents, *_] = sample.scheduler.step(
            prediction, sample.timestep, sample.latents, return_dict=False, **sample.step_arguments
        )
        sample.step += 1
        if sample.mend is not None:
            sample.latents = sample.mend(sample)
        output = StageOutput(sample.request_id, index=sample.index, progress=(sample.step, len(sample.timesteps)))
        if not sample.remaining:
            output.payload = self._model.finish(sample)
            self._leave(running, output)
        return [*outputs, output]

    def _leave(self, running: _Running, output: StageOutput) -> None:
        entry = self._entries[running.sample.request_id]
        entry.running.remove(running)
        if not entry.running:
            output.finished, output.finish_reason = True, "stop"
            self._entries.leave(running.sample.request_id)


def preview_calls(calls: int, previews: int) -> list[int]:
    """The calls (of `calls`, counted from 1) after which a preview is due: evenly spread, none after the last, at most
    one per call."""
    due = {-(-number * calls // (previews + 1)) for number in range(1, previews + 1)}
    return sorted(call for call in due if call < calls)
