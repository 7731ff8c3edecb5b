"""The README's table of figures: one row for each load and rival, with Segue's gain alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from segue.bench import first_sound
from segue.bench.comparisons import Measured, environment, spread
from segue.bench.harness.hardware import Machine
from segue.bench.harness.report import table
from segue.bench.own.results import OwnResult
from segue.bench.plain.comparison import ALL, SEGUE, PlainResult


@dataclass(frozen=True, kw_only=True)
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
    origin = _origin(result.machine, result.finished)
    if measured is not None:
        origin = origin if measured.alike else f"{origin}, {environment(alike=False)}"
        for row in measured.comparisons:
            if row.headline:
                yield Headline(
                    title=measured.title,
                    load=row.load,
                    figure=row.figure.partition(", ")[0],
                    rival=row.rival,
                    gains=row.gains,
                    origin=origin,
                )
    elif isinstance(result, OwnResult):
        for one in result.rows:
            if not one.side.startswith(SEGUE):
                gains = _gains(one.jct_ratio.by_round)
                yield _jct(f"A video model of one's own ({name})", one.clients, one.side, gains, origin)
    elif isinstance(result, PlainResult):
        for each in result.rows:
            if each.kind == ALL and each.side != SEGUE:
                kinds = {row.kind for row in result.rows} - {ALL}
                title = f"{_NAMES[result.benchmark]}: {', '.join(sorted(kinds))}"
                yield _jct(title, each.clients, each.side, _gains(each.jct_ratio.by_round), origin)
    elif isinstance(result, first_sound.SoundResult):
        pairs = zip(result.seconds[first_sound.GRAPH], result.seconds[first_sound.CHAIN], strict=True)
        yield Headline(
            title="Three models in one graph",
            load="1 client",
            figure="first audio",
            rival=f"the same models {first_sound.CHAIN}",
            gains=[theirs / mine for mine, theirs in pairs],
            origin=origin,
        )


_NAMES = {"bagel": "BAGEL", "mimo-audio": "MiMo-Audio"}


def _jct(title: str, clients: int, rival: str, gains: Sequence[float], origin: str) -> Headline:
    load = f"{clients} client{'s' if clients > 1 else ''}"
    return Headline(title=title, load=load, figure="JCT", rival=rival, gains=gains, origin=origin)


def _gains(ratios: Sequence[float]) -> list[float]:
    """Invert ratios of times, Segue's by a rival's."""
    return [1 / one for one in ratios]


def _origin(machine: Machine, finished: str) -> str:
    return f"{machine.cores} cores of {machine.cpu}, {finished[:10]}, {machine.commit}"


def headline_table(rows: Sequence[Headline]) -> str:
    """A Markdown table and its key. A gain is bold if Segue was better in every round; a title stands once."""
    origins = sorted({row.origin for row in rows}, key=lambda origin: [row.origin for row in rows].index(origin))
    cells, last = [], ""
    for row in rows:
        gain = f"{spread(row.gains, 2)}×"
        gain = f"**{gain}**" if min(row.gains) > 1 else gain
        title, last = (row.title if row.title != last else ""), row.title
        cells.append([title, row.load, row.figure, row.rival, gain, _letter(origins.index(row.origin))])
    head = ["what", "load", "figure", "rival", "Segue's gain", "measured"]
    key = "; ".join(f"{_letter(place)}: {origin}" for place, origin in enumerate(origins))
    return f"{table(head, cells)}\n\nMeasured on, date, commit: {key}."


def _letter(place: int) -> str:
    return chr(ord("A") + place)
