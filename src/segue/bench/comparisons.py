"""Comparisons of Segue with its rivals, from results: one row per load and rival with the figure of every round, for
docs/benchmarks.md, and with Segue's gain alone, for the README.

Rounds are pairs (the sides take turns with the same requests), so a gain is computed per round, and its median is
reported with the minimum and maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from string import ascii_uppercase
from typing import Any

from segue.bench import first_sound
from segue.bench.diffusion.results import DiffusionResult
from segue.bench.harness.hardware import Machine
from segue.bench.harness.report import table
from segue.bench.omni.results import LevelResult, Result
from segue.bench.own import OwnResult
from segue.bench.plain.comparison import ALL, SEGUE, PlainResult
from segue.bench.text.results import TextResult

GIB = 2**30
_MEDIA = {"mixed": "mixed media", "paper": "media of the paper's lengths and sizes"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of one load, for Segue and for one rival."""

    load: str
    figure: str
    """Name and unit of the compared figure."""
    lower_is_better: bool = False
    segue: str
    """Name of the side, with its precision."""
    rival: str
    mine: Sequence[float]
    """One value per round."""
    theirs: Sequence[float]
    memory: tuple[int, int]
    """Bytes of Segue's processes and of the rival's; 0: not measured."""
    headline: bool = True
    """Whether the README shows it: both sides compute in the same precision."""

    @property
    def gains(self) -> list[float]:
        """One gain per round; above 1 Segue is better."""
        pairs = zip(self.mine, self.theirs, strict=True)
        return [theirs / mine if self.lower_is_better else mine / theirs for mine, theirs in pairs]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The contents of one result file."""

    title: str
    result: Result | TextResult | DiffusionResult
    requests: str
    """Requests per round and side, in words."""
    notes: Sequence[str] = ()
    comparisons: Sequence[Comparison]
    more: str = ""
    """Tables of figures that are not comparisons."""

    @property
    def environment(self) -> str:
        """Which settings of the process the sides shared."""
        if self.result.settings.environment:
            return "allocator, huge pages and spinning alike on all sides"
        return "allocator settings and huge pages on Segue's side only"

    @property
    def conditions(self) -> str:
        """One sentence: machine, date, commit, rounds, and the sides' settings."""
        machine, notes = self.result.machine, [self.environment, *self.notes]
        rounds = f"{self.result.settings.rounds} interleaved rounds of {self.requests} per side"
        packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items() if name != "segue")
        return (
            f"{place_of(machine)}, {machine.memory_bytes / GIB:.0f} GiB, {packages}; "
            f"{self.result.finished[:10]}, commit {machine.commit}; {rounds}; "
            f"{'; '.join(notes)}; load average at the start {machine.load_average[0]:.1f}."
        )


def place_of(machine: Machine) -> str:
    """Its GPUs, if it has any, and its cores."""
    return ", ".join([*(gpu.partition(",")[0] for gpu in machine.gpus), f"{machine.cores} cores of {machine.cpu}"])


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with minimum and maximum if there are several values."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table; a gain is bold if Segue was better in every round."""
    head = ["load", "figure", "Segue", "rival", "Segue's figure", "rival's figure", "Segue's gain", "memory, GiB"]
    rows = []
    for one in comparisons:
        gain = f"{spread(one.gains, 2)}×"
        digits = 2 if max(*one.mine, *one.theirs) < 10 else 1
        memory = " / ".join(f"{size / GIB:.1f}" if size else "–" for size in one.memory)
        row = [one.load, one.figure, one.segue, one.rival, spread(one.mine, digits), spread(one.theirs, digits)]
        rows.append([*row, f"**{gain}**" if min(one.gains) > 1 else gain, memory])
    return table(head, rows)


def of_omni(result: Result) -> Measured:
    """Time to the whole answer, time to first audio, and real-time factor."""
    settings = result.settings
    made = []
    for level in result.levels:
        rivals = [side for side in level.sides if side != "segue"]
        for rival in rivals:
            memory = (level.usage["segue"].peak_pss_bytes, level.usage[rival].peak_pss_bytes)
            for name, figure in (("jct", "JCT, s"), ("ttfa", "first audio, s"), ("rtf", "real-time factor")):
                made.append(
                    Comparison(
                        load=level.load,
                        figure=figure,
                        lower_is_better=True,
                        segue=settings.dtype,
                        rival=f"{rival}, {settings.dtype}",
                        mine=_round_means(level, "segue", name, settings.requests),
                        theirs=_round_means(level, rival, name, settings.requests),
                        memory=memory,
                        headline=name != "rtf",
                    )
                )
    return Measured(
        title=f"Speech from {_MEDIA[settings.workload]} ({settings.model})",
        result=result,
        requests=f"{settings.requests} requests",
        comparisons=made,
        more=_hops(result.levels),
    )


def _round_means(level: LevelResult, side: str, name: str, requests: int) -> list[float]:
    outcomes = level.outcomes[side]
    rounds = [outcomes[start : start + requests] for start in range(0, len(outcomes), requests)]
    return [fmean(getattr(outcome, name) for outcome in one) for one in rounds]


def _hops(levels: Sequence[LevelResult]) -> str:
    rows = [
        [level.load, edge, str(hop.count), f"{1000 * hop.p50:.1f}", f"{1000 * hop.p99:.1f}"]
        for level in levels
        for edge, hop in level.hops.items()
    ]
    return table(["load", "edge of Segue", "chunks", "hop p50, ms", "hop p99, ms"], rows)


def of_text(result: TextResult) -> Measured:
    """Output tokens per second; every Segue side against every rival."""
    settings = result.settings
    made = []
    for scenario in result.scenarios:
        own = [side for side in scenario.sides if side.startswith("segue")]
        for rival in (side for side in scenario.sides if side not in own):
            for side in own:
                mine, theirs = scenario.sides[side], scenario.sides[rival]
                made.append(
                    Comparison(
                        load=scenario.name,
                        figure="output tokens/s",
                        segue=settings.precision.get(side, settings.dtype),
                        rival=f"{rival.partition(' in ')[0]}, {settings.precision.get(rival, settings.dtype)}",
                        mine=mine.by_round,
                        theirs=theirs.by_round,
                        memory=(mine.pss_bytes, theirs.pss_bytes),
                        headline=settings.precision.get(side) == settings.precision.get(rival),
                    )
                )
    start_up = ", ".join(f"{side} {seconds:.0f} s" for side, seconds in result.startup.items())
    return Measured(
        title=f"Text ({settings.model}, weights in {settings.kept or 'float32'} on disk)",
        result=result,
        requests="as many requests as clients, at least 4,",
        notes=[f"vLLM {settings.vllm}", f"start-up: {start_up}"],
        comparisons=made,
    )


def of_diffusion(result: DiffusionResult) -> Measured:
    """Denoising steps per second."""
    settings = result.settings
    made = []
    for scenario in result.scenarios:
        (_, mine), *rivals = scenario.sides.items()
        for rival, theirs in rivals:
            made.append(
                Comparison(
                    load=scenario.name.replace(" x ", "×"),
                    figure="steps/s",
                    segue=settings.dtype,
                    rival=f"{rival}, {settings.dtype}",
                    mine=mine.by_round,
                    theirs=theirs.by_round,
                    memory=(mine.pss_bytes, theirs.pss_bytes),
                )
            )
    largest = max(side.largest_difference for one in result.scenarios for side in one.sides.values())
    return Measured(
        title=f"Images ({settings.model}, {settings.pipeline})",
        result=result,
        requests=f"{settings.requests} images ({settings.requests // 2} with one client)",
        notes=[
            f"diffusers {settings.versions['diffusers']}",
            f"the images of both sides differ by at most {255 * largest:.0f} of 255 levels",
        ],
        comparisons=made,
    )


# --- the README


@dataclass(frozen=True)
class Headline:
    """A row. `gains`: one per round (per request, if only requests were counted); above 1 Segue is better."""

    title: str
    load: str
    figure: str
    rival: str
    gains: Sequence[float]
    origin: str
    """Machine, date and commit."""


def headlines(result: Any, measured: Measured | None, name: str) -> Iterator[Headline]:
    """Yield what the README says of one result; nothing for the kinds that have no rival. `name`: of its file."""
    machine = result.machine
    origin = f"{place_of(machine)}, {result.finished[:10]}, {machine.commit}"
    if measured is not None:
        origin = origin if measured.result.settings.environment else f"{origin}, {measured.environment}"
        for row in measured.comparisons:
            if row.headline:
                figure, _, _ = row.figure.partition(", ")
                yield Headline(measured.title, row.load, figure, row.rival, row.gains, origin)
    elif isinstance(result, OwnResult):
        for one in result.rows:
            if not one.side.startswith(SEGUE):
                title = f"A video model of one's own ({name})"
                yield _jct(title, one.clients, one.side, one.jct_ratio.by_round, origin)
    elif isinstance(result, PlainResult):
        for each in result.rows:
            if each.kind == ALL and each.side != SEGUE:
                kinds = {row.kind for row in result.rows} - {ALL}
                title = f"{_NAMES[result.benchmark]}: {', '.join(sorted(kinds))}"
                yield _jct(title, each.clients, each.side, each.jct_ratio.by_round, origin)
    elif isinstance(result, first_sound.SoundResult):
        pairs = zip(result.seconds[first_sound.GRAPH], result.seconds[first_sound.CHAIN], strict=True)
        gains = [theirs / mine for mine, theirs in pairs]
        rival = f"the same models {first_sound.CHAIN}"
        yield Headline("Three models in one graph", "1 client", "first audio", rival, gains, origin)


_NAMES = {"bagel": "BAGEL", "mimo-audio": "MiMo-Audio"}


def _jct(title: str, clients: int, rival: str, ratios: Sequence[float], origin: str) -> Headline:
    """`ratios`: of Segue's JCT by the rival's, one per round."""
    load = f"{clients} client{'s' if clients > 1 else ''}"
    return Headline(title, load, "JCT", rival, [1 / one for one in ratios], origin)


def headline_table(rows: Sequence[Headline]) -> str:
    """A Markdown table and its key. A gain is bold if Segue was better in every round; a title stands once."""
    origins = list(dict.fromkeys(row.origin for row in rows))
    cells, last = [], ""
    for row in rows:
        gain = f"{spread(row.gains, 2)}×"
        gain = f"**{gain}**" if min(row.gains) > 1 else gain
        title, last = (row.title if row.title != last else ""), row.title
        cells.append([title, row.load, row.figure, row.rival, gain, ascii_uppercase[origins.index(row.origin)]])
    head = ["what", "load", "figure", "rival", "Segue's gain", "measured"]
    key = "; ".join(f"{letter}: {origin}" for letter, origin in zip(ascii_uppercase, origins, strict=False))
    return f"{table(head, cells)}\n\nMeasured on, date, commit: {key}."
