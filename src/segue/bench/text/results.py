"""The result of `segue bench text`, in the format of its JSON file, and its computation from outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.bench.harness.load import outcomes_of
from segue.bench.harness.results import LoadResult
from segue.bench.harness.stats import Summary, summary
from segue.bench.text.workload import TextOutcome, TextSlice


class TextSettings(msgspec.Struct, kw_only=True):
    """Settings of the run."""

    model: str
    dtype: str
    seed: int
    rounds: int
    threads: int
    preload: str
    """Library preloaded on every side; empty: none."""
    vllm: str
    """Version of vLLM; empty: it did not take part."""
    kept: str = ""
    """Dtype of the checkpoint's weights on disk."""
    precision: dict[str, str] = {}
    """Side → the dtype it computes in, if not `dtype`."""
    environment: dict[str, str] = {}
    """Environment variables of all sides' processes; empty in older files, where only Segue's workers had any."""


class TextSide(msgspec.Struct, kw_only=True):
    """One side in one scenario, over all rounds. Times in seconds."""

    requests: int
    wall: float
    tokens_per_second: float
    """Output tokens divided by wall time."""
    by_round: list[float]
    """The same for each round."""
    ttft: Summary
    tpot: Summary
    itl: Summary | None
    jct: Summary
    goodput: float | None = None
    """Requests per second that met the objective."""
    kept: float | None = None
    """Share of requests that met it."""
    pss_bytes: int = 0
    """Memory of the side's processes after its last turn."""
    same_tokens: float = 1.0
    """Share of requests with the first side's tokens. Random weights have near ties, so less than 1 is not an error."""


class Scenario(msgspec.Struct, kw_only=True):
    """One load on every side."""

    name: str
    prompt: int
    output: int
    clients: int
    """0: arrivals of a Poisson process."""
    rate: float = 0.0
    """Arrivals per second."""
    objective: list[float] = []
    """[TTFT, TPOT] of goodput."""
    sides: dict[str, TextSide]
    ratios: dict[str, float]
    """Side → the first side's output tokens per second divided by its own."""


class TextResult(LoadResult, kw_only=True):
    benchmark: str = "text"
    settings: TextSettings
    scenarios: list[Scenario] = msgspec.field(default_factory=list)
    intrusion: dict[str, Summary] = msgspec.field(default_factory=dict)
    """Side → times between tokens of running decodes during the prefill of a long prompt."""
    intrusion_prompt: int = 0
    crowds: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """Case → side → seconds until the last answer: one prompt, equal prompts, different prompts, in growing numbers."""


def side_of(
    slices: Sequence[TextSlice], first: Sequence[TextSlice], objective: Sequence[float], pss_bytes: int = 0
) -> TextSide:
    """The figures of one side from its slices; `first`: slices of the side it is compared with."""
    outcomes = outcomes_of(slices)
    wall = sum(taken.wall for taken in slices)
    gaps = [gap for outcome in outcomes for gap in outcome.itls]
    same = [a.token_ids == b.token_ids for a, b in zip(outcomes, outcomes_of(first), strict=True)]
    kept = [keeps(outcome, objective) for outcome in outcomes] if objective else []
    return TextSide(
        requests=len(outcomes),
        wall=wall,
        tokens_per_second=sum(len(outcome.times) for outcome in outcomes) / wall,
        by_round=[speed(taken) for taken in slices],
        ttft=summary([outcome.ttft for outcome in outcomes]),
        tpot=summary([outcome.tpot for outcome in outcomes]),
        itl=summary(gaps) if gaps else None,
        jct=summary([outcome.jct for outcome in outcomes]),
        goodput=sum(kept) / wall if kept else None,
        kept=sum(kept) / len(kept) if kept else None,
        pss_bytes=pss_bytes,
        same_tokens=sum(same) / len(same),
    )


def speed(taken: TextSlice) -> float:
    """Output tokens per second."""
    return sum(len(outcome.times) for outcome in taken.outcomes) / taken.wall


def keeps(outcome: TextOutcome, objective: Sequence[float]) -> bool:
    """Whether a request met (TTFT, TPOT)."""
    ttft, tpot = objective
    return outcome.ttft <= ttft and outcome.tpot <= tpot
