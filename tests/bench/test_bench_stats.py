"""Figures against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.bench.harness.scenarios import ratios
from segue.bench.harness.stages import hop_figures
from segue.bench.harness.stats import added, histogram_figures, percentile, since, snapshot, summary, together
from segue.bench.omni.outcome import FirstAudio, OmniSlice, Outcome
from segue.bench.omni.results import METRICS, agreement, baseline_stages, figures, segue_stages
from segue.messages.stats import Histogram, WorkerStats

np = pytest.importorskip("numpy")


def outcome(index: int, jct: float, *, kind: str = "text", audio: float = 2.0, tokens: int = 3, **more) -> Outcome:
    values = {"ttft": jct / 10, "ttfa": jct / 2, "prompt_tokens": 5, "codes": 4 * tokens, "rms": 0.1, **more}
    values.setdefault("text_ids", list(range(tokens)))
    return Outcome(index=index, kind=kind, jct=jct, audio_seconds=audio, **values)


def test_percentiles_lie_between_their_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0.5) == 2.5
    assert percentile(values, 0.0) == 1.0
    assert percentile(values, 1.0) == 4.0
    assert percentile(values, 0.99) == pytest.approx(3.97)  # 2.97 steps up: 3 + 0.97
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-9)


def test_a_summary_is_mean_median_and_tail() -> None:
    found = summary([1.0, 2.0, 6.0])
    assert (found.mean, found.p50, found.worst) == (3.0, 2.0, 6.0)
    assert found.p99 == pytest.approx(5.92)


def test_a_sides_figures_count_all_its_rounds() -> None:
    rounds = [
        OmniSlice("segue", 2.0, [outcome(0, 1.0), outcome(1, 3.0, kind="image", audio=4.0)]),
        OmniSlice("segue", 3.0, [outcome(2, 2.0, tokens=5)]),
    ]
    found = figures(rounds)
    assert (found.requests, found.wall) == (3, 5.0)
    assert found.metrics["jct"].mean == 2.0
    assert found.metrics["rtf"].mean == pytest.approx((1 / 2 + 3 / 4 + 2 / 2) / 3)
    assert found.throughput == {
        "requests": pytest.approx(3 / 5),
        "reply_tokens": pytest.approx(11 / 5),
        "codes": pytest.approx(44 / 5),
        "audio_seconds": pytest.approx(8 / 5),
    }
    assert found.by_kind == {"image": 3.0, "text": 1.5}


def test_a_ratio_pairs_requests_and_is_certain_where_every_pair_agrees() -> None:
    mine = [OmniSlice("a", 1.0, [outcome(0, 1.0), outcome(1, 2.0)]), OmniSlice("a", 1.0, [outcome(2, 4.0)])]
    theirs = [OmniSlice("b", 1.0, [outcome(0, 4.0), outcome(1, 8.0)]), OmniSlice("b", 1.0, [outcome(2, 16.0)])]
    found = ratios(mine, theirs, METRICS)["jct"]
    assert found.mean == found.low == found.high == pytest.approx(0.25)
    assert found.by_round == [0.25, 0.25]


def test_a_ratio_of_means_weighs_long_requests_and_its_interval_holds_it() -> None:
    mine = [OmniSlice("a", 1.0, [outcome(0, 1.0), outcome(1, 1.0), outcome(2, 9.0)])]
    theirs = [OmniSlice("b", 1.0, [outcome(0, 2.0), outcome(1, 1.0), outcome(2, 19.0)])]
    found = ratios(mine, theirs, METRICS)["jct"]
    assert found.mean == pytest.approx(0.5)  # 11 / 22
    assert found.low == pytest.approx(9 / 19, abs=0.01)  # only the third request drawn
    assert found.low < found.mean < found.high <= 1.0
    assert ratios(mine, theirs, METRICS)["jct"] == found, "the same draw every time"


def test_sides_with_different_requests_have_no_ratio() -> None:
    mine = [OmniSlice("a", 1.0, [outcome(0, 1.0), outcome(1, 1.0)])]
    theirs = [OmniSlice("b", 1.0, [outcome(0, 1.0)])]
    with pytest.raises(ValueError, match="zip"):
        ratios(mine, theirs, METRICS)


def test_agreement_is_the_share_of_equal_answers() -> None:
    mine = [outcome(0, 1.0, text_ids=[1, 2], code_ids=[7]), outcome(1, 1.0, text_ids=[3], code_ids=[8])]
    theirs = [outcome(0, 9.0, text_ids=[1, 2], code_ids=[9]), outcome(1, 9.0, text_ids=[3], code_ids=[8])]
    assert agreement(mine, theirs) == {"reply": 1.0, "codes": 0.5}


def test_first_audio_is_80_ms_of_audio_not_silence() -> None:
    loud, silent = np.full(10, 0.1, np.float32), np.zeros(100, np.float32)
    first = FirstAudio(silence=1e-4)
    first.add(loud, 1000, now=1.0)  # 10 ms
    first.add(loud, 1000, now=2.0)
    assert first.at is None
    first.add(np.full(60, 0.1, np.float32), 1000, now=3.0)
    assert first.at == 3.0
    assert first.rms == pytest.approx(0.1)
    quiet = FirstAudio(silence=1e-4)
    quiet.add(silent, 1000, now=1.0)
    assert quiet.at is None
    quiet.add(loud, 1000, now=2.0)
    assert quiet.at == 2.0


# --- histograms


def test_histograms_are_summed_over_replicas_and_read_between_two_moments() -> None:
    before = Histogram((1.0, 2.0), [1, 0, 0], 0.5)
    after = Histogram((1.0, 2.0), [1, 3, 0], 5.0)
    between = since(after, before)
    assert (between.counts, between.sum) == ([0, 3, 0], 4.5)
    assert since(after, None) == after
    both = together([between, Histogram((1.0, 2.0), [1, 0, 2], 7.0)])
    assert (both.counts, both.sum) == ([1, 3, 2], 11.5)


def test_quantiles_of_a_histogram_lie_within_their_bucket() -> None:
    found = histogram_figures(Histogram((1.0, 2.0, 4.0), [2, 2, 0, 0], 5.0))
    assert found is not None
    assert (found.count, found.mean) == (4, 1.25)
    assert found.p50 == 1.0  # the second of four closes the first bucket
    assert found.p99 == pytest.approx(1.98)  # 3.96 of 4: 1.96 of the 2 in the second
    above = histogram_figures(Histogram((1.0, 2.0), [0, 0, 5], 50.0))
    assert above is not None
    assert above.p50 == 2.0  # nothing is known above the last bound
    assert histogram_figures(Histogram((1.0,), [0, 0], 0.0)) is None


def worker(stage: str, steps: Histogram, hops: Histogram | None = None) -> WorkerStats:
    edges = {} if hops is None else {f"thinker->{stage}": {"hop_seconds": hops, "bytes_total": 3.0}}
    return WorkerStats(stage, 0, {"step_seconds": steps, "running": 1.0}, edges)


def test_stage_figures_come_from_what_workers_counted_in_between() -> None:
    before = snapshot([worker("talker", Histogram((1.0,), [1, 0], 0.5))])
    hops = Histogram((0.001, 0.01), [1, 1, 0], 0.004)
    now = snapshot([worker("talker", Histogram((1.0,), [5, 0], 2.5), hops)])
    between = added(now, before)
    taken = [OmniSlice("segue", 4.0, [outcome(0, 1.0, tokens=10)])]
    talker = segue_stages(between, taken)["talker"]
    assert (talker.unit, talker.made, talker.busy) == ("codes", 40.0, 2.0)
    assert talker.per_busy_second == 20.0
    assert talker.utilisation == 0.5
    assert talker.steps is not None
    assert (talker.steps.count, talker.steps.mean) == (4, 0.5)
    assert hop_figures(between)["thinker->talker"].mean == pytest.approx(0.002)


def test_requests_of_one_static_batch_count_its_time_once() -> None:
    spans = [("queue", "waiting", 0.0, 1.0), ("thinker", "busy", 1.0, 3.0)]
    later = [("queue", "waiting", 0.0, 0.5), ("thinker", "busy", 0.5, 2.5)]  # sent half a second later
    outcomes = [
        outcome(0, 3.0, tokens=4, spans=spans, sent=10.0),
        outcome(1, 2.5, tokens=6, spans=later, sent=10.5),
        outcome(2, 3.0, tokens=2, spans=spans, sent=20.0),
    ]
    thinker = baseline_stages([OmniSlice("one", 8.0, outcomes)])["thinker"]
    assert (thinker.busy, thinker.made, thinker.per_busy_second) == (4.0, 12.0, 3.0)
    assert thinker.utilisation == 0.5
