"""`segue bench text`: compare Segue with `transformers` and vLLM on plain text. `docs/benchmarks.md` explains the
results."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from segue.bench.harness.child import same_environment
from segue.bench.harness.hardware import machine
from segue.bench.harness.load import Load, arriving, closed, in_turn, turn
from segue.bench.harness.load_results import Level, measure
from segue.bench.harness.meters import memory
from segue.bench.harness.stats import summary
from segue.bench.text.baseline import Options, ReferenceDriver, ReferenceProcess
from segue.bench.text.http import HttpDriver, segue_command, segue_deployment, vllm_command, vllm_environment
from segue.bench.text.results import Scenario, TextResult, TextSettings, side_of
from segue.bench.text.workload import Shape, TextDriver, TextRequest, intrude, poisson, requests, told
from segue.models.registry import read_config

SEGUE, CACHED, VLLM = "segue", "segue with prefix cache", "vllm"
PREFIXED, CROWD = Shape(1024, 16), Shape(64, 32)
"""Shapes of requests that share a prefix, and of simultaneous ones."""
DECODING = 4
"""Running answers when a long prompt arrives."""
FEWEST = 4
"""Minimum requests per side and round of a closed loop: a single one has little significance."""


@dataclass(frozen=True, kw_only=True)
class TextBench:
    """Settings of a run."""

    model_dir: Path
    out: Path
    shapes: Sequence[Shape]
    concurrency: Sequence[int]
    waves: int
    """Requests per client, round and side."""
    rounds: int
    baselines: Sequence[str]
    """Any of `one`, `static`, `continuous`."""
    vllm: Path | None
    """vLLM's Python interpreter."""
    vllm_cache_gib: int
    vllm_dtype: str
    """vLLM's dtype; the others compute in `dtype`."""
    quantized: Sequence[str]
    """Kinds of `quantization` with which Segue takes part additionally."""
    preload: Path | None
    threads: int
    dtype: str
    seed: int
    rates: Sequence[float]
    """Rates of Poisson arrivals, per second."""
    arrivals: int
    objective: tuple[float, float]
    shared_prefix: float
    """0: not measured."""
    long_prompt: int
    """0: not measured."""
    crowds: Sequence[int]
    """Sizes of crowds of simultaneous requests; empty: not measured."""
    keep: Callable[[TextResult], None]
    """Receives the result so far after every level."""
    say: Callable[[str], None] = print


@dataclass
class Sides:
    """The participating sides, in the order of a turn; the others are compared with the first."""

    segue: TextDriver
    cached: TextDriver
    vllm: TextDriver | None
    references: Mapping[str, TextDriver]
    quantized: Sequence[TextDriver] = ()
    index: int = 0
    started: dict[str, float] = field(default_factory=dict)

    @property
    def servers(self) -> list[TextDriver]:
        return [self.segue, *self.quantized, *([self.vllm] if self.vllm is not None else [])]

    def everyone(self, clients: int) -> list[TextDriver]:
        """The sides for a number of clients. With one client a static batch is one request, so it is left out."""
        ways = [driver for way, driver in self.references.items() if clients > 1 or way != "static"]
        return [*self.servers, *ways]


async def run(bench: TextBench) -> TextResult:
    """Start every side, measure, stop every side."""
    found = machine()
    bench.out.mkdir(parents=True, exist_ok=True)
    sides = _sides(bench)
    async with AsyncExitStack() as stack:
        starting: list[TextDriver] = [*sides.servers, *sides.references.values()]
        if bench.shared_prefix:
            starting.append(sides.cached)
        for driver in starting:
            bench.say(f"starting {driver.name}")
            stack.push_async_callback(driver.stop)
            await driver.start()
            sides.started[driver.name] = driver.startup
        result = TextResult(
            machine=found, startup=sides.started, settings=_settings(bench), intrusion_prompt=bench.long_prompt
        )
        await measure(result, levels(bench, sides, result), bench.keep)
    return result


def levels(bench: TextBench, sides: Sides, result: TextResult) -> list[Level]:
    """All requested levels, on sides that are already serving."""
    made: list[Level] = []
    for shape in bench.shapes:
        made += [partial(_clients, bench, sides, result, shape, clients) for clients in bench.concurrency]
        made += [partial(_arrivals, bench, sides, result, shape, rate) for rate in bench.rates]
    if bench.shared_prefix:
        made.append(partial(_prefixed, bench, sides, result))
    for size in bench.crowds:
        made.append(partial(_crowd, bench, sides, result, size, equal=False))
        if size == 10:
            made.append(partial(_crowd, bench, sides, result, size, equal=True))
    if bench.long_prompt:
        made += [partial(_intrusion, bench, sides, result, driver) for driver in sides.servers]
    return made


async def _clients(bench: TextBench, sides: Sides, result: TextResult, shape: Shape, clients: int) -> None:
    drivers, count = sides.everyone(clients), max(FEWEST, bench.waves * clients)
    result.scenarios.append(await _scenario(bench, sides, drivers, shape, clients, closed(clients), count))


async def _arrivals(bench: TextBench, sides: Sides, result: TextResult, shape: Shape, rate: float) -> None:
    load = arriving(poisson(rate, bench.arrivals, bench.seed))
    made = await _scenario(bench, sides, sides.servers, shape, 0, load, bench.arrivals, rate=rate)
    result.scenarios.append(made)


async def _prefixed(bench: TextBench, sides: Sides, result: TextResult) -> None:
    shape = replace(PREFIXED, shared=bench.shared_prefix)
    result.scenarios.append(await _scenario(bench, sides, [sides.cached, sides.segue], shape, 1, closed(1), 8))


async def _scenario(
    bench: TextBench,
    sides: Sides,
    drivers: Sequence[TextDriver],
    shape: Shape,
    clients: int,
    load: Load,
    count: int,
    *,
    rate: float = 0.0,
) -> Scenario:
    shared = f", {shape.shared:.0%} of the prompt shared" if shape.shared else ""
    name = f"{shape}, {f'{clients} clients' if clients else f'{rate:g} arrivals/s'}{shared}"
    bench.say(name)
    warm = _take(bench, sides, shape, 2)
    for driver in drivers:
        async with turn(driver, max(clients, 2)):
            await closed(2)(driver, warm)
    rounds = [_take(bench, sides, shape, count) for _ in range(bench.rounds)]
    slices = await in_turn(drivers, rounds, load, clients or max(bench.concurrency), bench.say, told)
    own = {driver.name: [taken for taken in slices if taken.side == driver.name] for driver in drivers}
    objective = [] if clients else list(bench.objective)
    first = own[drivers[0].name]
    made = {
        driver.name: side_of(own[driver.name], first, objective, memory(driver.processes())[0]) for driver in drivers
    }
    speed = made[drivers[0].name].tokens_per_second
    return Scenario(
        name=name,
        prompt=shape.prompt,
        output=shape.output,
        clients=clients,
        rate=rate,
        objective=objective,
        sides=made,
        ratios={side: speed / figures.tokens_per_second for side, figures in made.items() if side != drivers[0].name},
    )


async def _crowd(bench: TextBench, sides: Sides, result: TextResult, size: int, *, equal: bool) -> None:
    """Time `size` requests, simultaneous on Segue, sequential on `transformers`; the best of the rounds."""
    case = f"{size} {'equal' if equal else 'different'}"
    bench.say(f"a crowd: {case}")
    asked = [_take(bench, sides, CROWD, size, equal=equal) for _ in range(bench.rounds)]
    drivers: list[TextDriver] = [sides.segue, *(one for way, one in sides.references.items() if way == "one")]
    slices = await in_turn(drivers, asked, closed(size), size, bench.say, told)
    result.crowds[case] = {
        driver.name: min(taken.wall for taken in slices if taken.side == driver.name) for driver in drivers
    }


async def _intrusion(bench: TextBench, sides: Sides, result: TextResult, driver: TextDriver) -> None:
    bench.say(f"a prompt of {bench.long_prompt} tokens while {driver.name} decodes {DECODING}")
    # long enough to outlast the prefill: each of their tokens is a step, with one chunk of the prompt
    lasting = Shape(32, max(64, bench.long_prompt // 64))
    decoding = _take(bench, sides, lasting, DECODING)
    [long] = _take(bench, sides, Shape(bench.long_prompt, 1), 1)
    sides.index += 2
    result.intrusion[driver.name] = summary(await intrude(driver, decoding, long))


def _take(bench: TextBench, sides: Sides, shape: Shape, count: int, *, equal: bool = False) -> list[TextRequest]:
    """Requests that no side has seen."""
    start, sides.index = sides.index, sides.index + count
    vocab = int(read_config(bench.model_dir)["vocab_size"])
    return requests(shape, start, count, vocab, bench.seed, equal=equal)


def _sides(bench: TextBench) -> Sides:
    batch = max(*bench.concurrency, *bench.crowds, DECODING + 1)
    lengths = [*bench.shapes, CROWD, *([PREFIXED] if bench.shared_prefix else []), Shape(bench.long_prompt, 1)]
    longest = max(shape.prompt + shape.output for shape in lengths)
    common = same_environment(bench.threads, bench.preload)

    def served(name: str, *, cache: bool, quantization: str = "none") -> HttpDriver:
        deployment = segue_deployment(
            threads=bench.threads,
            max_batch=batch,
            max_model_len=longest,
            prefix_caching=cache,
            quantization=quantization,
        )
        path = bench.out / f"{name.replace(' ', '-')}.yaml"
        path.write_text(json.dumps(deployment))  # JSON is valid YAML
        return HttpDriver(name, segue_command(bench.model_dir, bench.dtype, path), common, path.with_suffix(".log"))

    vllm = None
    if bench.vllm is not None:
        name = _vllm_name(bench)
        command = vllm_command(bench.vllm, bench.model_dir, bench.vllm_dtype, max_batch=batch, max_model_len=longest)
        environment = {**common, **vllm_environment(bench.threads, bench.vllm_cache_gib)}
        vllm = HttpDriver(name, command, environment, bench.out / "vllm.log")
    options = Options(model_dir=str(bench.model_dir), dtype=bench.dtype, threads=bench.threads)
    process = ReferenceProcess(options, common)
    references = {way: ReferenceDriver(way, process) for way in bench.baselines}
    quantized = [served(f"{SEGUE} {kind}", cache=False, quantization=kind) for kind in bench.quantized]
    return Sides(served(SEGUE, cache=False), served(CACHED, cache=True), vllm, references, quantized)


def _vllm_name(bench: TextBench) -> str:
    return VLLM if bench.vllm_dtype == bench.dtype else f"{VLLM} in {bench.vllm_dtype}"


def _settings(bench: TextBench) -> TextSettings:
    version = ""
    if bench.vllm is not None:
        command = [str(bench.vllm), "-c", "from importlib.metadata import version; print(version('vllm'))"]
        version = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return TextSettings(
        model=bench.model_dir.name,
        dtype=bench.dtype,
        seed=bench.seed,
        rounds=bench.rounds,
        threads=bench.threads,
        preload="" if bench.preload is None else bench.preload.name,
        vllm=version,
        kept=str(read_config(bench.model_dir).get("dtype", "")),
        precision={f"{SEGUE} {kind}": kind for kind in bench.quantized}
        | ({} if bench.vllm_dtype == bench.dtype else {_vllm_name(bench): bench.vllm_dtype}),
        environment=same_environment(bench.threads, bench.preload),
    )
