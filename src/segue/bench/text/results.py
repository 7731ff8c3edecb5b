"""The result of `segue bench text`, in the format of its JSON file, and its computation from outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.bench.harness.load import outcomes_of
from segue.bench.harness.results import LoadResult
from segue.bench.harness.scenarios import LoadScenario, LoadSettings, LoadSide, speed, wall_of
from segue.bench.harness.stats import Summary, summary
from segue.bench.text.workload import TextOutcome, TextSlice


class TextSettings(LoadSettings, kw_only=True):
    """Settings of the run."""

    threads: int
    preload: str
    """Library preloaded on every side; empty: none."""
    vllm: str
    """Version of vLLM; empty: it did not take part."""
    kept: str = ""
    """Dtype of the checkpoint's weights on disk."""
    precision: dict[str, str] = msgspec.field(default_factory=dict)
    """Side → the dtype it computes in, if not `dtype`."""


class TextSide(LoadSide, kw_only=True):
    """One side in one scenario, over all rounds; `by_round`: output tokens per second. Times in seconds."""

    tokens_per_second: float
    ttft: Summary
    tpot: Summary
    itl: Summary | None
    goodput: float | None = None
    """Requests per second that met the objective."""
    kept: float | None = None
    """Share of requests that met it."""
    same_tokens: float = 1.0
    """Share of requests with the first side's tokens. Random weights have near ties, so less than 1 is not an error."""


class Scenario(LoadScenario, kw_only=True):
    """One load on every side."""

    prompt: int
    output: int
    objective: list[float] = msgspec.field(default_factory=list)
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
    outcomes, wall = outcomes_of(slices), wall_of(slices)
    gaps = [gap for outcome in outcomes for gap in outcome.itls]
    same = [a.token_ids == b.token_ids for a, b in zip(outcomes, outcomes_of(first), strict=True)]
    kept = [keeps(outcome, objective) for outcome in outcomes] if objective else []
    return TextSide(
        requests=len(outcomes),
        wall=wall,
        by_round=[speed(taken, TextOutcome.count) for taken in slices],
        jct=summary([outcome.jct for outcome in outcomes]),
        ttft=summary([outcome.ttft for outcome in outcomes]),
        tpot=summary([outcome.tpot for outcome in outcomes]),
        tokens_per_second=sum(outcome.count() for outcome in outcomes) / wall,
        itl=summary(gaps) if gaps else None,
        goodput=sum(kept) / wall if kept else None,
        kept=sum(kept) / len(kept) if kept else None,
        pss_bytes=pss_bytes,
        same_tokens=sum(same) / len(same),
    )


def keeps(outcome: TextOutcome, objective: Sequence[float]) -> bool:
    """Whether a request met (TTFT, TPOT)."""
    ttft, tpot = objective
    return outcome.ttft <= ttft and outcome.tpot <= tpot
