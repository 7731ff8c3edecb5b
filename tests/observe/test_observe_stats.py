"""Worker stats become exposition text that Prometheus' own parser reads back."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from segue.observe.stats import Histogram, WorkerStats, render_worker_stats


def parse(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families), "samples of a metric must stand together"
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


def test_stages_replicas_and_edges_are_labels() -> None:
    hops = Histogram((0.001, 0.01), [2, 1, 1], 0.5)
    text = render_worker_stats(
        [
            WorkerStats("thinker", 0, {"waiting": 2, "errors_total": 1.0}, {"thinker->talker": {"hop_seconds": hops}}),
            WorkerStats("thinker", 1, {"waiting": 3.5}),
            WorkerStats("talker", 0, {"waiting": math.inf}, {"talker->vocoder": {"bytes_total": 10}}),
        ]
    )
    got = parse(text)
    edge = {"stage": "thinker", "replica": "0", "edge": "thinker->talker"}
    assert got == {
        key("segue_stage_waiting", stage="thinker", replica="0"): 2,
        key("segue_stage_waiting", stage="thinker", replica="1"): 3.5,
        key("segue_stage_waiting", stage="talker", replica="0"): math.inf,
        key("segue_stage_errors_total", stage="thinker", replica="0"): 1,
        key("segue_edge_hop_seconds_bucket", **edge, le="0.001"): 2,
        key("segue_edge_hop_seconds_bucket", **edge, le="0.01"): 3,
        key("segue_edge_hop_seconds_bucket", **edge, le="+Inf"): 4,
        key("segue_edge_hop_seconds_sum", **edge): 0.5,
        key("segue_edge_hop_seconds_count", **edge): 4,
        key("segue_edge_bytes_total", stage="talker", replica="0", edge="talker->vocoder"): 10,
    }
    assert b"# TYPE segue_stage_waiting gauge" in text
    assert b"# TYPE segue_stage_errors_total counter" in text
    assert b"# TYPE segue_edge_hop_seconds histogram" in text


def test_nothing_is_nothing() -> None:
    assert render_worker_stats([]) == b""
    assert render_worker_stats([WorkerStats("thinker", 0)]) == b""


def test_one_name_has_one_kind() -> None:
    mixed = [WorkerStats("a", 0, {"x": 1.0}), WorkerStats("b", 0, {"x": Histogram.empty()})]
    with pytest.raises(ValueError, match="segue_stage_x is a gauge in one worker and a histogram in another"):
        render_worker_stats(mixed)


def test_stats_cross_a_process() -> None:
    sent = WorkerStats("thinker", 1, {"waiting": 2.0, "step_seconds": Histogram.empty()}, {"a->b": {"x": 1.0}})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=WorkerStats) == sent


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_every_value_in_its_bucket(values: list[float]) -> None:
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram.empty(bounds)
    for value in values:
        histogram.observe(value)
    got = parse(render_worker_stats([WorkerStats("s", 0, {"t": histogram})]))
    for bound, label in zip((*bounds, math.inf), ("0.5", "1.0", "10.0", "+Inf"), strict=True):
        count = sum(value <= bound for value in values)
        assert got[key("segue_stage_t_bucket", stage="s", replica="0", le=label)] == count
    assert got[key("segue_stage_t_sum", stage="s", replica="0")] == pytest.approx(sum(values))


@given(st.text(max_size=10), st.text(max_size=10), st.text(max_size=10), st.floats(allow_nan=False))
def test_any_name_is_escaped(stage: str, edge: str, name: str, value: float) -> None:
    # the parser of prometheus-client splits lines at every Unicode line end; the format knows only \n
    stage, edge = ("".join(c for c in text if c.isprintable() or c == "\n") for text in (stage, edge))
    got = parse(render_worker_stats([WorkerStats(stage, 0, {}, {edge: {name: value}})]))
    [(sample, labels)] = got
    assert sample.startswith("segue_edge_")
    assert dict(labels) == {"stage": stage, "replica": "0", "edge": edge}
    assert list(got.values()) == [value]
