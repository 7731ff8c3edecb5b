"""Measure a workload: requests of several kinds, on Segue and on a plain loop, which serves one request at a time.

Both sides get the same messages, decode greedily in float32, and make the same number of tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from segue.bench.harness.arguments import ModelBench, counts, execute, option
from segue.bench.harness.async_omni import AsyncOmniDriver
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import by_side, closed, in_turn, serving, warm_up
from segue.bench.harness.process import ChildProcess, Generate, ReferenceDriver, same_environment, serve_batches
from segue.bench.harness.report import Columns, host, page, startup_table, table_of
from segue.bench.harness.results import LoadResult, measure
from segue.bench.harness.stats import Ratio, Summary, ratio, summary
from segue.cli.parser import count
from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.deltas import AudioDelta, Finished, ImageDelta, TextDelta
from segue.messages.errors import ConfigError
from segue.messages.request import Request

SEGUE, LOOP, ALL = "segue", "plain loop", "all"

Prompt = dict[str, Any]
"""As `AsyncOmni` takes it: `messages`, `modalities`, and perhaps `options`."""


@dataclass(frozen=True, kw_only=True)
class PlainBench(ModelBench):
    """Settings of a run."""

    size: str = option("small", "of the preset, which is made if absent (default: small)")
    concurrency: Sequence[int] = option([1, 8], "clients (default: 1,8)", type=counts)
    tokens: int = option(96, "that a request generates (default: 96)", type=count)
    requests: int = option(12, "per side and round, at least as many as clients (default: 12)", type=count)
    rounds: int = option(3, type=count)


@dataclass(frozen=True)
class Workload:
    """A model, and the requests that it is sent."""

    name: str
    """Of the sub-command, and of the preset of `segue tiny`."""
    kinds: Mapping[str, Callable[[int], Prompt]]
    """Kind of request → the prompt that a seed gives."""
    stage: str
    """The stage that generates tokens."""
    config: dict[str, Any]
    """Deployment under which Segue decodes greedily."""
    loop: str
    """Main module of the loop's process; it calls `serve`."""


class PlainRequest(msgspec.Struct, frozen=True):
    index: int
    kind: str
    seed: int
    tokens: int


class Options(msgspec.Struct):
    model_dir: str
    threads: int


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""


class Answer(msgspec.Struct, tag=True):
    index: int
    token_ids: list[int]
    audio_seconds: float


class Loop(Protocol):
    """A plain loop over a loaded model."""

    def __call__(self, request: Request, tokens: int) -> tuple[list[int], float]:
        """Return the ids of that many tokens, and the seconds of audio that came with them."""
        ...


@dataclass
class Outcome:
    """Times are time.monotonic(); the loop returns its first output with the last."""

    token_ids: list[int]
    audio_seconds: float
    first: float
    end: float
    sent: float = 0.0

    def check(self, request: PlainRequest) -> None:
        if len(self.token_ids) != request.tokens:
            raise RuntimeError(f"request {request.index} has {len(self.token_ids)} tokens, not {request.tokens}")

    @property
    def jct(self) -> float:
        return self.end - self.sent


class Row(msgspec.Struct):
    """One side and kind of request (`all`: the kinds together), in seconds."""

    clients: int
    kind: str
    side: str
    requests_per_second: float
    first_output: Summary
    jct: Summary
    jct_ratio: Ratio
    """Segue's JCT by this one's."""
    rtf: Summary | None
    """JCT by the length of the audio; None for kinds without audio."""
    equal: float
    """Share of requests with Segue's tokens, and as much audio."""


class PlainResult(LoadResult, kw_only=True):
    benchmark: str
    tokens: int
    rows: list[Row] = msgspec.field(default_factory=list)


def serve(argv: list[str], kinds: Mapping[str, Callable[[int], Prompt]], load: Callable[[Options], Loop]) -> int:
    """The main function of the loop's process."""

    def loaded(options: Options) -> tuple[Loaded, Callable[[str], Generate[PlainRequest]]]:
        loop = load(options)

        def generate(requests: Sequence[PlainRequest]) -> list[Answer]:
            return [Answer(one.index, *loop(_request(kinds[one.kind](one.seed)), one.tokens)) for one in requests]

        return Loaded(), lambda way: generate

    return serve_batches(argv, Options, PlainRequest, loaded)


def _request(prompt: Prompt) -> Request:
    rest = {**prompt, "messages": messages_from(prompt["messages"], PYTHON_POLICY)}
    return Request(request_id="plain", **rest)


class Driver(AsyncOmniDriver):
    def __init__(self, bench: PlainBench, workload: Workload) -> None:
        super().__init__(SEGUE, bench.model_dir, dtype="float32", config=workload.config)
        self._workload = workload

    async def run(self, request: PlainRequest) -> Outcome:
        work, made = self._workload, Outcome([], 0.0, 0.0, 0.0)
        sampling = {work.stage: {"temperature": 0.0, "max_tokens": request.tokens, "ignore_eos": True}}
        prompt = {**work.kinds[request.kind](request.seed), "sampling": sampling}
        wanted = AudioDelta | ImageDelta if {"audio", "image"} & {*prompt["modalities"]} else TextDelta
        async for delta in self._omni.stream(self._omni.request(prompt)):
            if isinstance(delta, wanted):
                made.first = made.first or time.monotonic()
            if isinstance(delta, AudioDelta):
                made.audio_seconds += len(delta.samples) / 4 / delta.sample_rate
            elif isinstance(delta, Finished):
                made.token_ids = delta.token_ids[work.stage]
        made.end = time.monotonic()
        made.first = made.first or made.end  # a reply without visible text
        return made


async def run(bench: PlainBench, workload: Workload) -> PlainResult:
    """Start both sides, measure, stop both sides."""
    found = machine()
    options, around = Options(str(bench.model_dir), found.cores), same_environment(found.cores)
    process = ChildProcess[PlainRequest, Loaded, Answer](LOOP, workload.loop, options, Loaded, Answer, around)
    loop: ReferenceDriver[PlainRequest, Loaded, Answer, Outcome] = ReferenceDriver(
        LOOP, process, "one", lambda _, made, sent, end: Outcome(made.token_ids, made.audio_seconds, end, end)
    )
    sides: list[Any] = [Driver(bench, workload), loop]
    async with serving(sides, bench.say):
        startup = {driver.name: driver.startup for driver in sides}
        result = PlainResult(machine=found, startup=startup, benchmark=workload.name, tokens=bench.tokens)
        levels = [partial(_level, bench, workload, sides, result, clients) for clients in bench.concurrency]
        return await measure(result, levels, bench.keep)


async def _level(
    bench: PlainBench, workload: Workload, sides: Sequence[Any], result: PlainResult, clients: int
) -> None:
    kinds, draw, load = [*workload.kinds], random.Random(f"{bench.seed}/{clients}"), closed(clients)
    rounds = [
        [
            PlainRequest(index, kinds[index % len(kinds)], draw.getrandbits(32), bench.tokens)
            for index in range(max(bench.requests, clients, len(kinds)))
        ]
        for _ in range(bench.rounds + 1)
    ]
    await warm_up(sides, rounds.pop()[: max(clients, len(kinds))], load, clients)
    bench.say(f"{clients} clients")
    slices = by_side(await in_turn(sides, rounds, load, clients, bench.say, lambda taken: f"{taken.wall:.1f} s"))
    for kind in (*kinds, ALL):
        asked = [
            [place for place, one in enumerate(requests) if kind in (one.kind, ALL)] for requests in rounds
        ]  # of every round
        for side, taken in slices.items():
            pairs = [
                [(mine.outcomes[place], theirs.outcomes[place]) for place in places]
                for mine, theirs, places in zip(slices[SEGUE], taken, asked, strict=True)
            ]
            wall = sum(one.wall for one in taken)
            result.rows.append(_row(clients, kind, side, pairs, wall))


def _row(clients: int, kind: str, side: str, pairs: Sequence[Sequence[tuple[Outcome, Outcome]]], wall: float) -> Row:
    """`pairs`: of every round, Segue's outcome and this side's of each request."""
    both = [pair for of_round in pairs for pair in of_round]
    theirs = [outcome for _, outcome in both]
    rtf = [outcome.jct / outcome.audio_seconds for outcome in theirs if outcome.audio_seconds]
    return Row(
        clients,
        kind,
        side,
        requests_per_second=len(theirs) / wall,
        first_output=summary([outcome.first - outcome.sent for outcome in theirs]),
        jct=summary([outcome.jct for outcome in theirs]),
        jct_ratio=ratio([[(mine.jct, other.jct) for mine, other in of_round] for of_round in pairs]),
        rtf=summary(rtf) if rtf and kind != ALL else None,
        equal=sum(same(mine, other) for mine, other in both) / len(both),
    )


def same(mine: Outcome, other: Outcome) -> bool:
    """Whether two sides gave the same tokens, and as much audio."""
    return mine.token_ids == other.token_ids and abs(mine.audio_seconds - other.audio_seconds) < 1e-6


def markdown(result: PlainResult) -> str:
    columns: Columns[Row] = {
        "clients": lambda row: str(row.clients),
        "requests": lambda row: row.kind,
        "side": lambda row: row.side,
        "requests/s": lambda row: f"{row.requests_per_second:.2f}" if row.kind == ALL else "",
        "first output, s": lambda row: f"{row.first_output.p50:.2f}",
        "JCT, s": lambda row: f"{row.jct.p50:.2f}",
        "Segue's JCT of it": lambda row: f"{row.jct_ratio.mean:.2f}×",
        "RTF": lambda row: "" if row.rtf is None else f"{row.rtf.p50:.2f}",
        "equal": lambda row: f"{row.equal:.0%}",
    }
    of_run = f"{result.finished[:10]}, commit {result.machine.commit}. {host(result.machine, result.machine.packages)}"
    asked = f"Each request generates {result.tokens} tokens; the loop gives its first output with the last."
    return page([of_run, asked, *result.unfinished, startup_table(result.startup), table_of(result.rows, columns)])


def start(workload: Workload, bench: PlainBench) -> int:
    """Make the preset if it is absent, and run. Raises `ConfigError` for a size that it does not have."""
    if bench.model is None:
        from segue.models.registry import tiny_preset
        from segue.models.shared.tiny.made import filled

        preset, target = tiny_preset(workload.name), bench.cache / f"{workload.name}-{bench.size}"
        if bench.size not in preset.sizes:
            known = f"{workload.name} has no size {bench.size!r}; it has {', '.join(preset.sizes)}"
            raise ConfigError(known, field="size")
        if not (target / "config.json").is_file():
            with filled(target) as made:
                preset.make(made, bench.size, 0)
        bench = replace(bench, model=target)
    return execute(bench, workload.name, partial(run, workload=workload), markdown)
