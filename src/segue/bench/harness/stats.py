"""Statistics: summaries of values, ratios with their uncertainty, histograms of workers.

A ratio divides Segue's mean by a rival's; its interval is a paired bootstrap: requests are drawn with replacement, and
each drawn request brings its figure of both sides. `by_round` has the ratio of each round alone, so that drift is
visible.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec

from segue.messages.stats import Histogram, WorkerStats

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


def ratio(rounds: Sequence[Sequence[tuple[float, float]]], seed: int = 0) -> Ratio:
    """The ratio of mine to theirs, from the pairs of every round."""
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


Snapshot = dict[tuple[str, str], Histogram]
"""(stage or edge, name) → histogram since the workers' start."""


def snapshot(stats: Iterable[WorkerStats]) -> Snapshot:
    """All histograms of all stages and edges, summed over replicas."""
    found: dict[tuple[str, str], list[Histogram]] = {}
    for worker in stats:
        for owner, values in ((worker.stage, worker.values), *worker.edges.items()):
            for name, value in values.items():
                if isinstance(value, Histogram):
                    found.setdefault((owner, name), []).append(value)
    return {key: together(histograms) for key, histograms in found.items()}


def added(now: Snapshot, before: Snapshot) -> Snapshot:
    return {key: since(histogram, before.get(key)) for key, histogram in now.items()}
