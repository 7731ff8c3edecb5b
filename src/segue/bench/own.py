"""`segue bench own`: the example of a model of one's own, Segue against its author's loop, one request at a time and in
static batches. Needs `examples/own_model` installed. `python -m segue.bench.own FD OPTIONS` is the author's process."""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from segue.bench.harness import process
from segue.bench.harness.arguments import ModelBench, counts, execute, option
from segue.bench.harness.async_omni import AsyncOmniDriver
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import serving
from segue.bench.harness.report import Columns, of_run, page, startup_table, table_of
from segue.bench.harness.results import LoadResult, measure
from segue.bench.harness.rounds import Reply, compared
from segue.bench.harness.stats import Ratio, Summary
from segue.cli.parser import count
from segue.messages.deltas import Finished, VideoDelta
from segue.models.registry import read_config

NEEDS = ("action_video", "psutil")
SEGUE, ONE, STATIC = "segue", "author one at a time", "author static batches"
DTYPE = "float32"
SIZES = ("small", "medium")
_MEDIUM: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8}
_MEDIUM |= {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.1}
"""Of the trunk. `small`: what `python -m action_video` writes."""


@dataclass(frozen=True, kw_only=True)
class OwnBench(ModelBench):
    """Settings of a run."""

    size: str = option("small", "of the preset (default: small)", choices=SIZES, exclusive=True)
    workers: Sequence[int] = option([1], "of the trunk, Segue's sides, e.g. 1,2 (default: 1)", type=counts)
    concurrency: Sequence[int] = option([1, 4, 8], "clients (default: 1,4,8)", type=counts)
    frames: int = option(4, "new frames of a request (default: 4)", type=count)
    requests: int = option(8, "per side and round, at least as many as clients (default: 8)", type=count)
    rounds: int = option(3, type=count)


class OwnRequest(msgspec.Struct, frozen=True):
    index: int
    seed: int
    frames: int


class Answer(msgspec.Struct, tag=True):
    index: int
    codes: list[int]


class Outcome(Reply[list[int]]):
    """Codes."""

    def check(self, request: OwnRequest) -> None:
        if not self.made or len(self.made) % request.frames:
            raise RuntimeError(f"request {request.index} has {len(self.made)} codes for {request.frames} frames")


class Row(msgspec.Struct):
    """One side, in seconds. `jct_ratio`: Segue's JCT by this one's. `equal`: share of requests with Segue's codes.
    `pss_bytes`: peak memory of its processes (`segue.bench.harness.meters`); 0 in older files."""

    clients: int
    side: str
    frames_per_second: float
    first_frame: Summary
    jct: Summary
    jct_ratio: Ratio
    equal: float
    pss_bytes: int = 0


class OwnResult(LoadResult, kw_only=True):
    benchmark: str = "own"
    frames: int
    rows: list[Row] = msgspec.field(default_factory=list)


def markdown(result: OwnResult) -> str:
    columns: Columns[Row] = {
        "clients": lambda row: str(row.clients),
        "side": lambda row: row.side,
        "frames/s": lambda row: f"{row.frames_per_second:.2f}",
        "first frame, s": lambda row: f"{row.first_frame.p50:.2f}",
        f"JCT of {result.frames} frames, s": lambda row: f"{row.jct.p50:.2f}",
        "Segue's JCT of it": lambda row: f"{row.jct_ratio.mean:.2f}×",
        "PSS, MiB": lambda row: f"{row.pss_bytes / 2**20:.0f}" if row.pss_bytes else "–",
        "equal codes": lambda row: f"{row.equal:.0%}",
    }
    return page([of_run(result), *result.unfinished, startup_table(result.startup), table_of(result.rows, columns)])


def make_preset(directory: Path, size: str) -> Path:
    """The example's model in a size with random weights, under `directory`, made if absent. Needs `examples/own_model`
    installed."""
    target = directory / f"action-video-{size}"
    if not (target / "model.safetensors").is_file():  # the file that is moved there last
        importlib.import_module("segue.kernels")  # before transformers: `torchvision_shim`
        import torch

        from segue.models.shared.tiny.made import filled

        author = importlib.import_module("action_video")
        trunk = _MEDIUM if size == "medium" else importlib.import_module("action_video.__main__").TRUNK
        torch.manual_seed(0)
        with filled(target) as made:
            author.ActionVideoForGeneration(author.ActionVideoConfig(trunk=trunk)).save_pretrained(made)
    return target


def inputs(config: Any, request: OwnRequest) -> tuple[Any, Any]:
    """A random frame [height, width, 3] uint8, and random actions [frames, per frame, size] float32."""
    drawn = np.random.default_rng(request.seed)
    frame = drawn.integers(0, 256, (config.image_size, config.image_size, 3), dtype=np.uint8)
    shape = (request.frames, config.actions_per_frame, config.action_size)
    return frame, drawn.normal(size=shape).astype(np.float32)


def load(options: process.ModelOptions) -> tuple[process.Loaded, Callable[[str], process.Generate[OwnRequest]]]:
    """In the author's process: his model, and his loop over a batch. Both ways of serving call it."""
    import torch

    importlib.import_module("segue.kernels")  # before transformers: `torchvision_shim`
    torch.set_num_threads(options.threads)
    kind = importlib.import_module("action_video").ActionVideoForGeneration
    model = kind.from_pretrained(options.model_dir).eval()

    @torch.inference_mode()
    def generate(requests: Sequence[OwnRequest]) -> list[Answer]:
        given = [inputs(model.config, one) for one in requests]
        pixels = torch.stack([torch.from_numpy(frame) for frame, _ in given]).movedim(-1, 1) / 127.5 - 1
        actions = torch.stack([torch.from_numpy(items) for _, items in given])
        codes = model.imagine_codes(model.image_tokenizer.encode(pixels)[:, None], actions)
        model.image_tokenizer.decode(codes.flatten(0, 1))  # all this is his `imagine`, which does not return codes
        return [Answer(one.index, row.flatten().tolist()) for one, row in zip(requests, codes, strict=True)]

    return process.Loaded(), lambda way: generate


class Driver(AsyncOmniDriver):
    def __init__(self, bench: OwnBench, workers: int) -> None:
        name = SEGUE if workers == 1 else f"{SEGUE}, {workers} workers"
        config = {"stages": {"trunk": {"replicas": workers}}}
        super().__init__(name, bench.model_dir, dtype=DTYPE, config=config)
        self._config = SimpleNamespace(**read_config(bench.model_dir))

    async def run(self, request: OwnRequest) -> Outcome:
        frame, actions = inputs(self._config, request)
        parts = [{"type": "image", "image": frame}, {"type": "tensor", "name": "actions", "data": actions}]
        asked = {"messages": [{"role": "user", "content": parts}], "modalities": ["video"]}
        came = Outcome([])
        async for delta in self._omni.stream(self._omni.request(asked)):
            if isinstance(delta, VideoDelta):
                came.first = came.first or time.monotonic()
            elif isinstance(delta, Finished):
                [came.made] = delta.token_ids.values()
        came.end = time.monotonic()
        return came


def start(bench: OwnBench) -> int:
    """Run on the checkpoint, or on one that is made."""
    return execute(replace(bench, model=bench.model or make_preset(bench.cache, bench.size)), "own", run, markdown)


def _outcome(request: OwnRequest, made: Answer, sent: float, end: float) -> Outcome:
    return Outcome(made.codes, end, end)  # its first frame comes with the last


async def run(bench: OwnBench) -> OwnResult:
    """Start every side, measure, stop every side."""
    found = machine()
    options = process.ModelOptions(model_dir=str(bench.model_dir), dtype=DTYPE, threads=found.cores)
    around, answers = process.same_environment(found.cores), (process.Loaded, Answer)
    author = process.ChildProcess[OwnRequest, process.Loaded, Answer](ONE, "segue.bench.own", options, *answers, around)
    sides: list[Any] = [Driver(bench, many) for many in bench.workers]
    for name, way in ((ONE, "one"), (STATIC, "static")):
        sides.append(process.ReferenceDriver(name, author, way, _outcome))
    async with serving(sides, bench.say):
        startup = {driver.name: driver.startup for driver in sides}
        result = OwnResult(machine=found, startup=startup, frames=bench.frames)
        levels = [partial(_level, bench, sides, result, clients) for clients in bench.concurrency]
        return await measure(result, levels, bench.keep)


async def _level(bench: OwnBench, sides: Sequence[Any], result: OwnResult, clients: int) -> None:
    from segue.bench.harness.meters import watched  # with psutil, which may be missing: not for --help

    drivers = [driver for driver in sides if clients > 1 or driver.name != STATIC]
    seed, many = random.Random(f"{bench.seed}/{clients}"), range(max(bench.requests, clients))
    rounds = [[OwnRequest(i, seed.getrandbits(32), bench.frames) for i in many] for _ in range(bench.rounds + 1)]
    warm, (its_turn, used) = rounds.pop()[:clients], watched(drivers)
    found = await compared(drivers, warm, rounds, clients, bench.say, its_turn=its_turn)
    for side, one in found.items():
        speed = bench.frames * len(one.outcomes) / one.wall
        frame, jct = one.summary(lambda it: it.first_output), one.summary(lambda it: it.jct)
        times, equal = one.first_of_it(lambda it: it.jct), one.equal(lambda a, b: a.made == b.made)
        result.rows.append(Row(clients, side, speed, frame, jct, times, equal, used[side].peak_pss_bytes))


if __name__ == "__main__":
    sys.exit(process.serve_batches(sys.argv[1:], process.ModelOptions, OwnRequest, load))
