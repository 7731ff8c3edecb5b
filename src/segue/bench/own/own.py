"""`segue bench own`: the example of a model of one's own, Segue against its author's loop, one request at a time and in
static batches. Needs `examples/own_model` installed. `python -m segue.bench.own.own FD OPTIONS` is the author's
process."""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec

from segue.bench.harness.async_omni import AsyncOmniDriver
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import by_side, closed, in_turn, outcomes_of, serving, turn, warm_up
from segue.bench.harness.meters import Watch
from segue.bench.harness.process import ChildProcess, Generate, ReferenceDriver, same_environment, serve_batches
from segue.bench.harness.results import measure
from segue.bench.harness.stats import ratio, summary
from segue.bench.own.arguments import OwnBench
from segue.bench.own.results import OwnResult, Row
from segue.messages.deltas import Finished, VideoDelta
from segue.models.registry import read_config

SEGUE, ONE, STATIC = "segue", "author one at a time", "author static batches"


class OwnRequest(msgspec.Struct, frozen=True):
    index: int
    seed: int
    frames: int


class Options(msgspec.Struct):
    model_dir: str
    threads: int


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""


class Answer(msgspec.Struct, tag=True):
    index: int
    codes: list[int]


@dataclass
class Outcome:
    """Times are time.monotonic(); the author's loop returns its first frame with the last."""

    codes: list[int]
    first: float
    end: float
    sent: float = 0.0

    def check(self, request: OwnRequest) -> None:
        if not self.codes or len(self.codes) % request.frames:
            raise RuntimeError(f"request {request.index} has {len(self.codes)} codes for {request.frames} frames")


def inputs(config: Any, request: OwnRequest) -> tuple[Any, Any]:
    """A random frame [height, width, 3] uint8, and random actions [frames, per frame, size] float32."""
    import numpy as np

    drawn = np.random.default_rng(request.seed)
    frame = drawn.integers(0, 256, (config.image_size, config.image_size, 3), dtype=np.uint8)
    shape = (request.frames, config.actions_per_frame, config.action_size)
    return frame, drawn.normal(size=shape).astype(np.float32)


def load(options: Options) -> tuple[Loaded, Callable[[str], Generate[OwnRequest]]]:
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

    return Loaded(), lambda way: generate


class Driver(AsyncOmniDriver):
    config: Any = None

    async def run(self, request: OwnRequest) -> Outcome:
        frame, actions = inputs(self.config, request)
        parts = [{"type": "image", "image": frame}, {"type": "tensor", "name": "actions", "data": actions}]
        asked = {"messages": [{"role": "user", "content": parts}], "modalities": ["video"]}
        made = Outcome([], 0.0, 0.0)
        async for delta in self._omni.stream(self._omni.request(asked)):
            if isinstance(delta, VideoDelta):
                made.first = made.first or time.monotonic()
            elif isinstance(delta, Finished):
                [made.codes] = delta.token_ids.values()
        made.end = time.monotonic()
        return made


async def run(bench: OwnBench) -> OwnResult:
    """Start every side, measure, stop every side."""
    found = machine()
    options = Options(str(bench.model_dir), found.cores)
    around = same_environment(found.cores)
    author = ChildProcess[OwnRequest, Loaded, Answer](ONE, "segue.bench.own.own", options, Loaded, Answer, around)
    sides: list[Any] = []
    for many in bench.workers:
        name = SEGUE if many == 1 else f"{SEGUE}, {many} workers"
        config = {"stages": {"trunk": {"replicas": many}}}
        sides.append(Driver(name, bench.model_dir, dtype="float32", config=config))
        sides[-1].config = SimpleNamespace(**read_config(bench.model_dir))
    for name, way in ((ONE, "one"), (STATIC, "static")):
        sides.append(ReferenceDriver(name, author, way, lambda _, made, sent, end: Outcome(made.codes, end, end)))
    async with serving(sides, bench.say):
        startup = {driver.name: driver.startup for driver in sides}
        result = OwnResult(machine=found, startup=startup, frames=bench.frames)
        levels = [partial(_level, bench, sides, result, clients) for clients in bench.concurrency]
        return await measure(result, levels, bench.keep)


async def _level(bench: OwnBench, sides: Sequence[Any], result: OwnResult, clients: int) -> None:
    drivers = [driver for driver in sides if clients > 1 or driver.name != STATIC]
    seed, many, load = random.Random(f"{bench.seed}/{clients}"), range(max(bench.requests, clients)), closed(clients)
    rounds = [[OwnRequest(i, seed.getrandbits(32), bench.frames) for i in many] for _ in range(bench.rounds + 1)]
    await warm_up(drivers, rounds.pop()[:clients], load, clients)
    bench.say(f"{clients} clients")
    everyone = [pid for driver in sides for pid in driver.processes()]
    watches = {driver.name: Watch(driver.processes(), everyone) for driver in drivers}

    @asynccontextmanager
    async def watched(driver: Any, together: int) -> AsyncIterator[None]:
        async with turn(driver, together), watches[driver.name].watching():
            yield

    taken_turns = await in_turn(drivers, rounds, load, clients, bench.say, lambda one: f"{one.wall:.1f} s", watched)
    slices = by_side(taken_turns)
    for side, taken in slices.items():
        first = slices[sides[0].name]
        pairs = [list(zip(a.outcomes, b.outcomes, strict=True)) for a, b in zip(first, taken, strict=True)]
        times = ratio([[(a.end - a.sent, b.end - b.sent) for a, b in both] for both in pairs])
        theirs = outcomes_of(taken)
        speed = bench.frames * len(theirs) / sum(one.wall for one in taken)
        frame, jct = summary([one.first - one.sent for one in theirs]), summary([one.end - one.sent for one in theirs])
        equal = sum(a.codes == b.codes for both in pairs for a, b in both) / len(theirs)
        memory = watches[side].usage.peak_pss_bytes
        result.rows.append(Row(clients, side, speed, frame, jct, times, equal, memory))


if __name__ == "__main__":
    sys.exit(serve_batches(sys.argv[1:], Options, OwnRequest, load))
