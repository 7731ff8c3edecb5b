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
import numpy as np

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
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, nearest
from segue.messages.request import Request

SEGUE, LOOP, ALL = "segue", "plain loop", "all"

Prompt = dict[str, Any]
"""As `AsyncOmni` takes it: `messages`, `modalities`, and perhaps `options`."""


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class PlainBench(ModelBench):
    """Settings of a run."""

    size: str = option("small", "of the preset, which is made if absent (default: small)")
    concurrency: Sequence[int] = option([1, 8], "clients (default: 1,8)", type=counts)
    tokens: int = option(96, "that a request for text or speech generates (default: 96)", type=count)
    kinds: Sequence[str] = option([], "of requests, e.g. text-image,image-image (default: all)", type=_names)
    requests: int = option(12, "per side and round, at least as many as clients (default: 12)", type=count)
    rounds: int = option(3, type=count)


@dataclass(frozen=True, kw_only=True)
class DrawingBench(PlainBench):
    """Settings of a run in which images are drawn."""

    side: int = option(256, "pixels of an image's sides (default: 256)", type=count)
    steps: int = option(10, "noise levels of an image; the network is called once less (default: 10)", type=count)


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
    denoiser: str = ""
    """The stage that draws; empty: none does."""


class Image(msgspec.Struct, frozen=True):
    """How an image is drawn."""

    side: int
    """Pixels of its height and its width."""
    steps: int
    """Noise levels."""


class PlainRequest(msgspec.Struct, frozen=True):
    index: int
    kind: str
    seed: int
    tokens: int
    """0 for an image."""
    image: Image | None = None
    """Set for an image."""


class Options(msgspec.Struct):
    model_dir: str
    threads: int


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""

    ceiling: float
    """Operations per second of a large matmul on the same device, if images are drawn."""


class Made(msgspec.Struct, kw_only=True):
    """What came of one request."""

    token_ids: list[int] = []
    audio_seconds: float = 0.0
    image: bytes = b""
    """[height, width, 3] uint8."""
    denoised: tuple[float, float] = (0.0, 0.0)
    """From when to when its image was denoised, by `time.monotonic`."""
    flops: float = 0.0
    """Operations of its denoising."""


class Answer(Made, tag=True, kw_only=True):
    index: int


class Loop(Protocol):
    """A plain loop over a loaded model."""

    @property
    def ceiling(self) -> float:
        """As in `Loaded`."""
        ...

    def __call__(self, request: Request, tokens: int) -> Made:
        """Return that many tokens, with the audio that came with them, or an image."""
        ...


@dataclass
class Outcome:
    """Times are time.monotonic(); the loop returns its first output with the last."""

    made: Made
    first: float
    end: float
    sent: float = 0.0

    def check(self, request: PlainRequest) -> None:
        if len(self.made.token_ids) != request.tokens:
            raise RuntimeError(f"request {request.index} has {len(self.made.token_ids)} tokens, not {request.tokens}")
        image, size = request.image, len(self.made.image)
        if image is not None and size != 3 * image.side**2:
            raise RuntimeError(f"request {request.index} has an image of {size} bytes, not of {image.side}² pixels")

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
    """Share of requests with Segue's tokens, as much audio, and its image."""
    denoising: float | None = None
    """Operations of denoising per second in which images were denoised, of those that a matmul reaches."""


class PlainResult(LoadResult, kw_only=True):
    benchmark: str
    tokens: int
    image: Image | None = None
    ceiling: float = 0.0
    """As in `Loaded`."""
    rows: list[Row] = msgspec.field(default_factory=list)


def serve(argv: list[str], kinds: Mapping[str, Callable[[int], Prompt]], load: Callable[[Options], Loop]) -> int:
    """The main function of the loop's process."""

    def loaded(options: Options) -> tuple[Loaded, Callable[[str], Generate[PlainRequest]]]:
        loop = load(options)

        def answer(one: PlainRequest) -> Answer:
            made = loop(_request(kinds[one.kind](one.seed), one), one.tokens)
            return Answer(index=one.index, **msgspec.structs.asdict(made))

        return Loaded(loop.ceiling), lambda way: lambda requests: [answer(one) for one in requests]

    return serve_batches(argv, Options, PlainRequest, loaded)


def _request(prompt: Prompt, asked: PlainRequest) -> Request:
    rest = {**prompt, "messages": messages_from(prompt["messages"], PYTHON_POLICY)}
    if (image := asked.image) is not None:
        size = DiffusionParams(height=image.side, width=image.side, num_inference_steps=image.steps)
        rest |= {"diffusion": size, "seed": asked.seed}
    return Request(request_id="plain", **rest)


class Driver(AsyncOmniDriver):
    def __init__(self, bench: PlainBench, workload: Workload) -> None:
        super().__init__(SEGUE, bench.model_dir, dtype="float32", config=workload.config)
        self._workload = workload

    async def run(self, request: PlainRequest) -> Outcome:
        work, came = self._workload, Outcome(Made(), 0.0, 0.0)
        made, began = came.made, time.monotonic()
        prompt = {**work.kinds[request.kind](request.seed), **_asked(request, work.stage)}
        wanted = AudioDelta | ImageDelta if {"audio", "image"} & {*prompt["modalities"]} else TextDelta
        async for delta in self._omni.stream(self._omni.request(prompt)):
            if isinstance(delta, wanted):
                came.first = came.first or time.monotonic()
            if isinstance(delta, AudioDelta):
                made.audio_seconds += len(delta.samples) / 4 / delta.sample_rate
            elif isinstance(delta, ImageDelta):
                made.image = delta.data
            elif isinstance(delta, Finished):
                made.token_ids = delta.token_ids[work.stage]
                spans = [span for span in delta.metrics.spans if span[0] == work.denoiser and span[1] != "queue"]
                if spans:
                    made.denoised = began + min(span[2] for span in spans), began + max(span[3] for span in spans)
        came.end = time.monotonic()
        came.first = came.first or came.end  # a reply without visible text
        return came


def _asked(request: PlainRequest, stage: str) -> Prompt:
    """What is asked of Segue beside the prompt."""
    if (image := request.image) is None:
        return {"sampling": {stage: {"temperature": 0.0, "max_tokens": request.tokens, "ignore_eos": True}}}
    return {"height": image.side, "width": image.side, "num_inference_steps": image.steps, "seed": request.seed}


async def run(bench: PlainBench, workload: Workload) -> PlainResult:
    """Start both sides, measure, stop both sides."""
    found = machine()
    options, around = Options(str(bench.model_dir), found.cores), same_environment(found.cores)
    process = ChildProcess[PlainRequest, Loaded, Answer](LOOP, workload.loop, options, Loaded, Answer, around)
    loop: ReferenceDriver[PlainRequest, Loaded, Answer, Outcome] = ReferenceDriver(
        LOOP, process, "one", lambda _, made, sent, end: Outcome(made, end, end)
    )
    sides: list[Any] = [Driver(bench, workload), loop]
    async with serving(sides, bench.say):
        startup = {driver.name: driver.startup for driver in sides}
        result = PlainResult(machine=found, startup=startup, benchmark=workload.name, tokens=bench.tokens)
        result.image, result.ceiling = _image(bench), (await process.start()).ceiling
        levels = [partial(_level, bench, workload, sides, result, clients) for clients in bench.concurrency]
        return await measure(result, levels, bench.keep)


async def _level(
    bench: PlainBench, workload: Workload, sides: Sequence[Any], result: PlainResult, clients: int
) -> None:
    kinds, draw, load = [*workload.kinds], random.Random(f"{bench.seed}/{clients}"), closed(clients)
    drawn = {kind for kind, prompt in workload.kinds.items() if "image" in prompt(0)["modalities"]}

    def asked_for(index: int) -> PlainRequest:
        kind, seed = kinds[index % len(kinds)], draw.getrandbits(32)
        if kind in drawn:
            return PlainRequest(index, kind, seed, 0, _image(bench))
        return PlainRequest(index, kind, seed, bench.tokens)

    count = max(bench.requests, clients, len(kinds))
    rounds = [[asked_for(index) for index in range(count)] for _ in range(bench.rounds + 1)]
    await warm_up(sides, rounds.pop()[: max(clients, len(kinds))], load, clients)
    bench.say(f"{clients} clients")
    slices = by_side(await in_turn(sides, rounds, load, clients, bench.say, lambda taken: f"{taken.wall:.1f} s"))
    for ours, theirs in zip(slices[SEGUE], slices[LOOP], strict=True):
        for mine, other in zip(ours.outcomes, theirs.outcomes, strict=True):
            mine.made.flops = other.made.flops
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
            row = _row(clients, kind, side, pairs, wall)
            if kind in drawn or (kind == ALL and drawn == {*kinds}):
                made = [outcome.made for of_round in pairs for _, outcome in of_round]
                row.denoising = _denoising(made) / result.ceiling
            result.rows.append(row)


def _image(bench: PlainBench) -> Image | None:
    return Image(bench.side, bench.steps) if isinstance(bench, DrawingBench) else None


def _denoising(made: Sequence[Made]) -> float:
    """Operations of denoising per second in which at least one image was denoised."""
    seconds = end = 0.0
    for begin, stop in sorted(one.denoised for one in made):
        seconds += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return sum(one.flops for one in made) / seconds


def _row(clients: int, kind: str, side: str, pairs: Sequence[Sequence[tuple[Outcome, Outcome]]], wall: float) -> Row:
    """`pairs`: of every round, Segue's outcome and this side's of each request."""
    both = [pair for of_round in pairs for pair in of_round]
    theirs = [outcome for _, outcome in both]
    rtf = [outcome.jct / outcome.made.audio_seconds for outcome in theirs if outcome.made.audio_seconds]
    return Row(
        clients,
        kind,
        side,
        requests_per_second=len(theirs) / wall,
        first_output=summary([outcome.first - outcome.sent for outcome in theirs]),
        jct=summary([outcome.jct for outcome in theirs]),
        jct_ratio=ratio([[(mine.jct, other.jct) for mine, other in of_round] for of_round in pairs]),
        rtf=summary(rtf) if rtf and kind != ALL else None,
        equal=sum(same(mine.made, other.made) for mine, other in both) / len(both),
    )


def same(mine: Made, other: Made) -> bool:
    """Whether two sides gave the same tokens, as much audio, and images whose levels differ by 1 at most, where other
    orders of sums round to another one."""
    if mine.token_ids != other.token_ids or abs(mine.audio_seconds - other.audio_seconds) >= 1e-6:
        return False
    images = [np.frombuffer(one.image, np.uint8).astype(np.int16) for one in (mine, other)]
    return images[0].shape == images[1].shape and bool((np.abs(images[0] - images[1]) <= 1).all())


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
        **({} if result.image is None else {"denoising, of the ceiling": _of_ceiling}),
    }
    of_run = f"{result.finished[:10]}, commit {result.machine.commit}. {host(result.machine, result.machine.packages)}"
    asked = f"Each reply has {result.tokens} tokens; the loop gives its first output with the last."
    drawn = [] if result.image is None else [_drawn(result.image, result.ceiling)]
    tables = [startup_table(result.startup), table_of(result.rows, columns)]
    return page([of_run, asked, *drawn, *result.unfinished, *tables])


def _of_ceiling(row: Row) -> str:
    return "" if row.denoising is None else f"{row.denoising:.0%}"


def _drawn(image: Image, ceiling: float) -> str:
    return (
        f"Images have {image.side} × {image.side} pixels and {image.steps} noise levels. A matmul reaches "
        f"{ceiling / 1e9:.0f} GFLOP/s; denoising is compared with it over the time in which images are denoised, "
        "whatever else is computed then."
    )


def start(workload: Workload, bench: PlainBench) -> int:
    """Make the preset if it is absent, and run. Raises `ConfigError` for a size that it does not have, or a kind of
    requests that does not exist."""
    kinds = {kind.replace(" → ", "-"): kind for kind in workload.kinds}
    for name in bench.kinds:
        if name not in kinds:
            raise ConfigError(f"{workload.name} has no kind of requests {name!r}{nearest(name, kinds)}", field="kinds")
    if bench.kinds:
        workload = replace(workload, kinds={kinds[name]: workload.kinds[kinds[name]] for name in bench.kinds})
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
