"""`segue bench text`: compare Segue with `transformers` and vLLM on plain text. `docs/benchmarks.md` explains the
results."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from segue.bench.harness.hardware import machine
from segue.bench.harness.load import by_side, closed, in_turn, load_of, serving, warm_up
from segue.bench.harness.meters import memory
from segue.bench.harness.process import ChildProcess, Loaded, ModelOptions, ReferenceDriver, same_environment
from segue.bench.harness.results import Level, measure
from segue.bench.harness.scenarios import speed
from segue.bench.harness.stats import summary
from segue.bench.text.arguments import TextBench
from segue.bench.text.http import HttpDriver, segue_command, vllm_command, vllm_environment
from segue.bench.text.reference import Answer
from segue.bench.text.results import Scenario, TextResult, TextSettings, side_of
from segue.bench.text.workload import Shape, TextDriver, TextOutcome, TextRequest, TextSlice, intrude, requests
from segue.models.registry import read_config

SEGUE, CACHED, VLLM = "segue", "segue with prefix cache", "vllm"
NAMES = {
    "one": "transformers one at a time",
    "static": "transformers static batches",
    "continuous": "transformers generate_batch",
}
PREFIXED, CROWD = Shape(1024, 16), Shape(64, 32)
"""Shapes of requests that share a prefix, and of simultaneous ones."""
DECODING = 4
"""Running answers when a long prompt arrives."""
FEWEST = 4
"""Minimum requests per side and round of a closed loop: a single one has little significance."""


@dataclass
class Sides:
    """The participating sides, in the order of a turn; the others are compared with the first."""

    segue: TextDriver
    cached: TextDriver
    vllm: TextDriver | None
    references: Mapping[str, TextDriver]
    quantized: Sequence[TextDriver] = ()

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
    sides = _sides(bench)
    drivers = [*sides.servers, *sides.references.values(), *([sides.cached] if bench.shared_prefix else [])]
    async with serving(drivers, bench.say):
        startup = {driver.name: driver.startup for driver in drivers}
        result = TextResult(
            machine=found, startup=startup, settings=_settings(bench), intrusion_prompt=bench.long_prompt
        )
        return await measure(result, Run(bench, sides, result).levels(), bench.keep)


@dataclass
class Run:
    """A run of sides that are serving."""

    bench: TextBench
    sides: Sides
    result: TextResult
    index: int = 0
    """Of the next request: no side has seen it."""

    def levels(self) -> list[Level]:
        """All requested levels."""
        bench, sides = self.bench, self.sides
        made: list[Level] = []
        for shape in bench.shapes:
            for clients in bench.concurrency:
                count = max(FEWEST, bench.waves * clients)
                made.append(partial(self._scenario, sides.everyone(clients), shape, count, clients))
            made += [partial(self._scenario, sides.servers, shape, bench.arrivals, 0, rate) for rate in bench.rates]
        if bench.shared_prefix:
            shape = replace(PREFIXED, shared=bench.shared_prefix)
            made.append(partial(self._scenario, [sides.cached, sides.segue], shape, 8, 1))
        for size in bench.crowds:
            made += [partial(self._crowd, size, equal) for equal in ((False, True) if size == 10 else (False,))]
        if bench.long_prompt:
            made += [partial(self._intrusion, driver) for driver in sides.servers]
        return made

    async def _scenario(
        self, drivers: Sequence[TextDriver], shape: Shape, count: int, clients: int, rate: float = 0.0
    ) -> None:
        """`count`: requests per round; `clients`: 0 for arrivals at `rate`."""
        bench = self.bench
        shared = f", {shape.shared:.0%} of the prompt shared" if shape.shared else ""
        name = f"{shape}, {f'{clients} clients' if clients else f'{rate:g} arrivals/s'}{shared}"
        bench.say(name)
        await warm_up(drivers, self._take(shape, 2), closed(2), max(clients, 2))
        rounds = [self._take(shape, count) for _ in range(bench.rounds)]
        load = load_of(clients, rate, count, bench.seed)
        own = by_side(await in_turn(drivers, rounds, load, clients or max(bench.concurrency), bench.say, _progress))
        objective = [] if clients else list(bench.objective)
        first, *others = (driver.name for driver in drivers)
        held = {driver.name: memory(driver.processes())[0] for driver in drivers}
        made = {side: side_of(taken, own[first], objective, held[side]) for side, taken in own.items()}
        self.result.scenarios.append(
            Scenario(
                name=name,
                prompt=shape.prompt,
                output=shape.output,
                clients=clients,
                rate=rate,
                objective=objective,
                sides=made,
                ratios={side: made[first].tokens_per_second / made[side].tokens_per_second for side in others},
            )
        )

    async def _crowd(self, size: int, equal: bool) -> None:
        """Time `size` requests, simultaneous on Segue, sequential on `transformers`; the best of the rounds."""
        bench, case = self.bench, f"{size} {'equal' if equal else 'different'}"
        bench.say(f"a crowd: {case}")
        asked = [self._take(CROWD, size, equal=equal) for _ in range(bench.rounds)]
        drivers = [self.sides.segue, *(one for way, one in self.sides.references.items() if way == "one")]
        own = by_side(await in_turn(drivers, asked, closed(size), size, bench.say, _progress))
        self.result.crowds[case] = {name: min(taken.wall for taken in slices) for name, slices in own.items()}

    async def _intrusion(self, driver: TextDriver) -> None:
        prompt = self.bench.long_prompt
        self.bench.say(f"a prompt of {prompt} tokens while {driver.name} decodes {DECODING}")
        # long enough to outlast the prefill: each of their tokens is a step, with one chunk of the prompt
        decoding = self._take(Shape(32, max(64, prompt // 64)), DECODING)
        [long] = self._take(Shape(prompt, 1), 1)
        self.index += 2
        self.result.intrusion[driver.name] = summary(await intrude(driver, decoding, long))

    def _take(self, shape: Shape, count: int, *, equal: bool = False) -> list[TextRequest]:
        """Requests that no side has seen."""
        start, self.index = self.index, self.index + count
        vocab = int(read_config(self.bench.model_dir)["vocab_size"])
        return requests(shape, start, count, vocab, self.bench.seed, equal=equal)


def _progress(taken: TextSlice) -> str:
    return f"{speed(taken, TextOutcome.count):.1f} tokens/s"


def _sides(bench: TextBench) -> Sides:
    batch = max(*bench.concurrency, *bench.crowds, DECODING + 1)
    lengths = [*bench.shapes, CROWD, *([PREFIXED] if bench.shared_prefix else []), Shape(bench.long_prompt, 1)]
    longest = max(shape.prompt + shape.output for shape in lengths)
    common = same_environment(bench.threads, bench.preload)
    logs = bench.path.with_suffix("").resolve()
    logs.mkdir(parents=True, exist_ok=True)

    def served(name: str, **stage: object) -> HttpDriver:
        given: dict[str, object] = {"threads": bench.threads, "max_batch": batch, "max_model_len": longest}
        given |= {"prefix_caching": False, "quantization": "none", **stage}
        path = logs / f"{name.replace(' ', '-')}.yaml"
        path.write_text(json.dumps({"stages": {"llm": given}}))  # JSON is valid YAML
        return HttpDriver(name, segue_command(bench.model_dir, bench.dtype, path), common, path.with_suffix(".log"))

    vllm = None
    if bench.vllm_python is not None:
        name, dtype = _vllm(bench)
        command = vllm_command(bench.vllm_python, bench.model_dir, dtype, max_batch=batch, max_model_len=longest)
        environment = {**common, **vllm_environment(bench.threads, bench.vllm_cache_gib)}
        vllm = HttpDriver(name, command, environment, logs / "vllm.log")
    options = ModelOptions(model_dir=str(bench.model_dir), dtype=bench.dtype, threads=bench.threads)
    process: ChildProcess[TextRequest, Loaded, Answer] = ChildProcess(
        "transformers", "segue.bench.text.reference", options, Loaded, Answer, common
    )
    references = {way: ReferenceDriver(NAMES[way], process, way, _outcome) for way in bench.baseline}
    quantized = [served(f"{SEGUE} {kind}", quantization=kind) for kind in bench.quantized]
    return Sides(served(SEGUE), served(CACHED, prefix_caching=True), vllm, references, quantized)


def _outcome(request: TextRequest, answer: Answer, sent: float, came: float) -> TextOutcome:
    # when a server could have sent each token: the library is not penalised for having none
    times = [at - sent for at in answer.times]
    return TextOutcome(index=request.index, times=times, jct=came - sent, token_ids=answer.token_ids)


def _vllm(bench: TextBench) -> tuple[str, str]:
    """The side's name, and the dtype it computes in."""
    dtype = bench.vllm_dtype or bench.dtype
    return (VLLM if dtype == bench.dtype else f"{VLLM} in {dtype}"), dtype


def _settings(bench: TextBench) -> TextSettings:
    version = ""
    if bench.vllm_python is not None:
        command = [str(bench.vllm_python), "-c", "from importlib.metadata import version; print(version('vllm'))"]
        version = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    name, dtype = _vllm(bench)
    precision = {f"{SEGUE} {kind}": kind for kind in bench.quantized}
    return TextSettings(
        model=bench.model_dir.name,
        dtype=bench.dtype,
        seed=bench.seed,
        rounds=bench.rounds,
        threads=bench.threads,
        preload="" if bench.preload is None else bench.preload.name,
        vllm=version,
        kept=str(read_config(bench.model_dir).get("dtype", "")),
        precision=precision if dtype == bench.dtype else {**precision, name: dtype},
        environment=same_environment(bench.threads, bench.preload),
    )
