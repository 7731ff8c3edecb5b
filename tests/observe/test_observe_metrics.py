"""The times a client feels, measured with a clock the test turns."""

from __future__ import annotations

from contextlib import closing

from segue.messages.deltas import AudioDelta, Finished, RequestMetrics, TextDelta, Usage
from segue.observe.metrics import GenerationWatch, ServerMetrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_generation_is_timed_by_its_deltas() -> None:
    clock = Clock()
    metrics = ServerMetrics(clock)
    with closing(GenerationWatch(metrics)) as watch:
        assert value(metrics, "segue_generations_in_flight") == 1
        for seconds, delta in (
            (0.5, TextDelta("t", "a")),
            (0.25, TextDelta("t", "b")),
            (0.25, AudioDelta("v", b"", 24000)),
            (1.0, AudioDelta("v", b"", 24000)),
            (0.5, TextDelta("t", "c")),
            (0.5, Finished("length", {}, Usage(), RequestMetrics())),
        ):
            clock.now += seconds
            watch.saw(delta)
    assert value(metrics, "segue_ttft_seconds_sum") == 0.5
    assert value(metrics, "segue_ttfa_seconds_sum") == 1.0
    assert value(metrics, "segue_ttfa_seconds_count") == 1
    assert value(metrics, "segue_itl_seconds_sum") == 0.25 + 1.75
    assert value(metrics, "segue_itl_seconds_count") == 2
    assert value(metrics, "segue_jct_seconds_sum") == 3.0
    assert value(metrics, "segue_generations_in_flight") == 0
    assert value(metrics, "segue_generations_total", end="length") == 1


def test_how_a_generation_ended_is_counted() -> None:
    metrics = ServerMetrics(Clock())
    with closing(GenerationWatch(metrics)):
        pass
    with closing(GenerationWatch(metrics)) as watch:
        watch.failed("stage_lost")
    assert value(metrics, "segue_generations_total", end="aborted") == 1
    assert value(metrics, "segue_generations_total", end="stage_lost") == 1
    assert value(metrics, "segue_jct_seconds_count") == 0


def test_two_servers_count_apart() -> None:
    one, other = ServerMetrics(Clock()), ServerMetrics(Clock())
    one.http_requests.labels("GET", "/health", "200").inc()
    assert b'endpoint="/health"' in one.exposition()
    assert b'endpoint="/health"' not in other.exposition()
