"""Measure a workload: requests of several kinds, on Segue and on a plain loop, which serves one request at a time.

Both sides get the same messages, decode greedily in float32, and make the same number of tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from segue.bench.harness import process
from segue.bench.harness.arguments import ModelBench, counts, execute, option
from segue.bench.harness.async_omni import AsyncOmniDriver
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import serving
from segue.bench.harness.report import Columns, of_run, page, startup_table, table_of
from segue.bench.harness.results import LoadResult, measure
from segue.bench.harness.rounds import Compared, Reply, compared
from segue.bench.harness.stats import Ratio, Summary, summary
from segue.cli.parser import count
from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.deltas import AudioDelta, Finished, ImageDelta, TextDelta
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, nearest
from segue.messages.request import Request

SEGUE, LOOP, ALL = "segue", "plain loop", "all"
DTYPE = "float32"

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


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""

    ceiling: float
    """Operations per second of a large matmul on the same device, if images are drawn."""


class Made(msgspec.Struct, tag=True, kw_only=True):
    """What came of one request."""

    index: int = 0
    """Of the request; set in the loop's process."""
    token_ids: list[int] = []
    audio_seconds: float = 0.0
    image: bytes = b""
    """[height, width, 3] uint8."""
    denoised: tuple[float, float] = (0.0, 0.0)
    """From when to when its image was denoised, by `time.monotonic`."""
    flops: float = 0.0
    """Operations of its denoising."""


class Loop(Protocol):
    """A plain loop over a loaded model. `ceiling`: as in `Loaded`."""

    ceiling: float

    def __call__(self, request: Request, tokens: int) -> Made:
        """Return that many tokens, with the audio that came with them, or an image."""


class Outcome(Reply[Made]):
    """What one side made, and when."""

    def check(self, request: PlainRequest) -> None:
        if len(self.made.token_ids) != request.tokens:
            raise RuntimeError(f"request {request.index} has {len(self.made.token_ids)} tokens, not {request.tokens}")
        image, size = request.image, len(self.made.image)
        if image is not None and size != 3 * image.side**2:
            raise RuntimeError(f"request {request.index} has an image of {size} bytes, not of {image.side}² pixels")


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


def serve(argv: list[str], kinds: Mapping[str, Callable[[int], Prompt]], load: Callable[[Any], Loop]) -> int:
    """The main function of the loop's process. `load`: makes the loop from a `LoadContext`."""
    import torch

    from segue.engines.contract import LoadContext

    def loaded(options: process.ModelOptions) -> tuple[Loaded, Callable[[str], process.Generate[PlainRequest]]]:
        torch.set_num_threads(options.threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loop = load(LoadContext(Path(options.model_dir), "plain", device, torch.float32))

        def answer(one: PlainRequest) -> Made:
            made = loop(_request(kinds[one.kind](one.seed), one), one.tokens)
            made.index = one.index
            return made

        return Loaded(loop.ceiling), lambda way: lambda requests: [answer(one) for one in requests]

    return process.serve_batches(argv, process.ModelOptions, PlainRequest, loaded)


def _request(prompt: Prompt, asked: PlainRequest) -> Request:
    rest = {**prompt, "messages": messages_from(prompt["messages"], PYTHON_POLICY)}
    if (image := asked.image) is not None:
        size = DiffusionParams(height=image.side, width=image.side, num_inference_steps=image.steps)
        rest |= {"diffusion": size, "seed": asked.seed}
    return Request(request_id="plain", **rest)


class Driver(AsyncOmniDriver):
    def __init__(self, bench: PlainBench, workload: Workload) -> None:
        super().__init__(SEGUE, bench.model_dir, dtype=DTYPE, config=workload.config)
        self._workload = workload

    async def run(self, request: PlainRequest) -> Outcome:
        work, came = self._workload, Outcome(Made())
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


def _outcome(request: PlainRequest, made: Made, sent: float, end: float) -> Outcome:
    return Outcome(made, end, end)  # its first output comes with the last


async def run(bench: PlainBench, workload: Workload) -> PlainResult:
    """Start both sides, measure, stop both sides."""
    found = machine()
    options = process.ModelOptions(model_dir=str(bench.model_dir), dtype=DTYPE, threads=found.cores)
    around = process.same_environment(found.cores)
    child = process.ChildProcess[PlainRequest, Loaded, Made](LOOP, workload.loop, options, Loaded, Made, around)
    sides: list[Any] = [Driver(bench, workload), process.ReferenceDriver(LOOP, child, "one", _outcome)]
    async with serving(sides, bench.say):
        startup = {driver.name: driver.startup for driver in sides}
        result = PlainResult(machine=found, startup=startup, benchmark=workload.name, tokens=bench.tokens)
        result.image, result.ceiling = _image(bench), (await child.start()).ceiling
        levels = [partial(_level, bench, workload, sides, result, clients) for clients in bench.concurrency]
        return await measure(result, levels, bench.keep)


async def _level(
    bench: PlainBench, workload: Workload, sides: Sequence[Any], result: PlainResult, clients: int
) -> None:
    kinds, draw = [*workload.kinds], random.Random(f"{bench.seed}/{clients}")
    drawn = {kind for kind, prompt in workload.kinds.items() if "image" in prompt(0)["modalities"]}

    def asked_for(index: int) -> PlainRequest:
        kind, seed = kinds[index % len(kinds)], draw.getrandbits(32)
        if kind in drawn:
            return PlainRequest(index, kind, seed, 0, _image(bench))
        return PlainRequest(index, kind, seed, bench.tokens)

    count = max(bench.requests, clients, len(kinds))
    rounds = [[asked_for(index) for index in range(count)] for _ in range(bench.rounds + 1)]
    warm = rounds.pop()[: max(clients, len(kinds))]
    found: dict[str, Compared[PlainRequest, Outcome]] = await compared(sides, warm, rounds, clients, bench.say)
    for ours, theirs in zip(found[SEGUE].outcomes, found[LOOP].outcomes, strict=True):
        ours.made.flops = theirs.made.flops
    for kind in (*kinds, ALL):
        for side, taken in found.items():
            of_images = kind in drawn or (kind == ALL and drawn == {*kinds})
            result.rows.append(_row(clients, kind, side, taken, result.ceiling if of_images else None))


def _image(bench: PlainBench) -> Image | None:
    return Image(bench.side, bench.steps) if isinstance(bench, DrawingBench) else None


def _denoising(made: Sequence[Made]) -> float:
    """Operations of denoising per second in which at least one image was denoised."""
    seconds = end = 0.0
    for begin, stop in sorted(one.denoised for one in made):
        seconds += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return sum(one.flops for one in made) / seconds


def _row(clients: int, kind: str, side: str, taken: Compared[PlainRequest, Outcome], ceiling: float | None) -> Row:
    one = taken.only(lambda request: kind in (request.kind, ALL))
    rtf = [outcome.jct / outcome.made.audio_seconds for outcome in one.outcomes if outcome.made.audio_seconds]
    return Row(
        *(clients, kind, side),
        requests_per_second=len(one.outcomes) / one.wall,
        first_output=one.summary(lambda outcome: outcome.first_output),
        jct=one.summary(lambda outcome: outcome.jct),
        jct_ratio=one.first_of_it(lambda outcome: outcome.jct),
        rtf=summary(rtf) if rtf and kind != ALL else None,
        equal=one.equal(lambda first, mine: same(first.made, mine.made)),
        denoising=None if ceiling is None else _denoising([outcome.made for outcome in one.outcomes]) / ceiling,
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
    }
    asked = f"Each reply has {result.tokens} tokens; the loop gives its first output with the last."
    drawn = []
    if (image := result.image) is not None:
        title = "denoising, of the ceiling"
        columns = {**columns, title: lambda row: "" if row.denoising is None else f"{row.denoising:.0%}"}
        drawn.append(
            f"Images have {image.side} × {image.side} pixels and {image.steps} noise levels. A matmul reaches "
            f"{result.ceiling / 1e9:.0f} GFLOP/s; denoising is compared with it over the time in which images are "
            "denoised, whatever else is computed then."
        )
    tables = [startup_table(result.startup), table_of(result.rows, columns)]
    return page([of_run(result), asked, *drawn, *result.unfinished, *tables])


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
