"""Compute figures from outcomes: percentiles, ratios with their uncertainty, throughput, histograms of workers.

Times are aggregated over all requests of a side and concurrency, all rounds together. A ratio divides Segue's mean by
the baseline's; its interval is a paired bootstrap: requests are drawn with replacement, and each drawn request brings
its figure of both sides. `by_round` has the ratio of each round alone, so that drift is visible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import msgspec

from segue.bench.omni.outcome import OmniSlice, Outcome
from segue.messages.stats import Histogram

METRICS: dict[str, Callable[[Outcome], float]] = {
    "jct": lambda outcome: outcome.jct,
    "ttft": lambda outcome: outcome.ttft,
    "ttfa": lambda outcome: outcome.ttfa,
    "rtf": lambda outcome: outcome.rtf,
}
RESAMPLES = 2000


class Summary(msgspec.Struct):
    """Statistics of a set of values; seconds, or a plain ratio for `rtf`."""

    mean: float
    p50: float
    p99: float
    worst: float


class Ratio(msgspec.Struct):
    """Segue's figure divided by a baseline's: 0.3 means 70% less."""

    mean: float
    """Ratio of the means over all requests."""
    low: float
    high: float
    """95% interval."""
    by_round: list[float]


class SideFigures(msgspec.Struct, kw_only=True):
    """One side at one concurrency."""

    requests: int
    wall: float
    """Seconds in which this side worked, all rounds together."""
    metrics: dict[str, Summary]
    throughput: dict[str, float]
    """Per second of wall time: `requests`, `reply_tokens`, `codes`, `audio_seconds`."""
    by_kind: dict[str, float]
    """Mean JCT of text, image, audio and video requests."""


class HistogramFigures(msgspec.Struct):
    """Statistics of a histogram: quantiles are interpolated within its buckets."""

    count: int
    mean: float
    p50: float
    p99: float


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile, q in [0, 1], linear between the two nearest values."""
    if not values:
        raise ValueError("percentile of nothing")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def summary(values: Sequence[float]) -> Summary:
    return Summary(mean(values), percentile(values, 0.5), percentile(values, 0.99), max(values))


def figures(slices: Sequence[OmniSlice]) -> SideFigures:
    """The figures of one side's slices."""
    outcomes = [outcome for taken in slices for outcome in taken.outcomes]
    wall = sum(taken.wall for taken in slices)
    made = {
        "requests": float(len(outcomes)),
        "reply_tokens": float(sum(len(outcome.text_ids) for outcome in outcomes)),
        "codes": float(sum(outcome.codes for outcome in outcomes)),
        "audio_seconds": sum(outcome.audio_seconds for outcome in outcomes),
    }
    kinds = sorted({outcome.kind for outcome in outcomes})
    return SideFigures(
        requests=len(outcomes),
        wall=wall,
        metrics={name: summary([of(outcome) for outcome in outcomes]) for name, of in METRICS.items()},
        throughput={name: count / wall for name, count in made.items()},
        by_kind={kind: mean([o.jct for o in outcomes if o.kind == kind]) for kind in kinds},
    )


def ratio(
    mine: Sequence[OmniSlice], theirs: Sequence[OmniSlice], of: Callable[[Outcome], float], seed: int = 0
) -> Ratio:
    """The ratio of mine to theirs; both must have the same requests in the same rounds."""
    rounds = [
        [(of(a), of(b)) for a, b in zip(left.outcomes, right.outcomes, strict=True)]
        for left, right in zip(mine, theirs, strict=True)
    ]
    pairs = [pair for pairs in rounds for pair in pairs]
    draw = random.Random(seed)
    resampled = [_of_means(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]
    return Ratio(
        _of_means(pairs),
        percentile(resampled, 0.025),
        percentile(resampled, 0.975),
        [_of_means(pairs) for pairs in rounds],
    )


def _of_means(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs)


def agreement(mine: Iterable[Outcome], theirs: Iterable[Outcome]) -> dict[str, float]:
    """Share of requests whose `reply` tokens and whose `codes` are equal on both sides.

    Not a correctness test (those are in tests/): with float32 and greedy decoding it should be 1; a lower value is a
    sign of a problem.
    """
    pairs = list(zip(mine, theirs, strict=True))
    return {
        "reply": mean([float(a.text_ids == b.text_ids) for a, b in pairs]),
        "codes": mean([float(a.code_ids == b.code_ids) for a, b in pairs]),
    }


# --- histograms of workers


def since(now: Histogram, before: Histogram | None) -> Histogram:
    """The observations added between two readings of one histogram."""
    if before is None:
        return now
    counts = [a - b for a, b in zip(now.counts, before.counts, strict=True)]
    return Histogram(now.bounds, counts, now.sum - before.sum)


def together(histograms: Sequence[Histogram]) -> Histogram:
    """The sum of histograms with the same bounds (replicas of one stage)."""
    counts = [sum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True)]
    return Histogram(histograms[0].bounds, counts, sum(histogram.sum for histogram in histograms))


def histogram_figures(histogram: Histogram) -> HistogramFigures | None:
    """The figures of a histogram, None if it is empty."""
    count = sum(histogram.counts)
    if not count:
        return None
    return HistogramFigures(count, histogram.sum / count, _quantile(histogram, 0.5), _quantile(histogram, 0.99))


def _quantile(histogram: Histogram, q: float) -> float:
    """Linear within its bucket; the last bound for values above it, as in Prometheus."""
    wanted = q * sum(histogram.counts)
    lower = before = 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if count and before + count >= wanted:
            return lower + (bound - lower) * (wanted - before) / count
        lower, before = bound, before + count
    return histogram.bounds[-1]
