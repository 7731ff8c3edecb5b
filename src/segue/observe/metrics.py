"""Metrics of the server process: HTTP requests and client-visible latencies. One registry per server, none global."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from segue.messages.deltas import AudioDelta, Delta, EncodedDelta, Finished, TextDelta

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServerMetrics:
    """The registry of one server. Names begin with `segue_`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "segue_http_requests", "HTTP requests answered.", ["method", "endpoint", "status"], registry=self.registry
        )
        self.http_seconds = Histogram(
            "segue_http_request_seconds",
            "Time from a request's arrival to the last byte of its response.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge("segue_http_requests_in_flight", "HTTP requests being answered.", registry=self.registry)
        self.generations_in_flight = Gauge(
            "segue_generations_in_flight", "Generations requested and not finished.", registry=self.registry
        )
        self.generations = Counter(
            "segue_generations", "Generations by how they ended.", ["end"], registry=self.registry
        )
        self.ttft = self._histogram("segue_ttft_seconds", "Time from the parsed request to its first text.", _SECONDS)
        self.ttfa = self._histogram("segue_ttfa_seconds", "Time from the parsed request to its first audio.", _SECONDS)
        self.jct = self._histogram("segue_jct_seconds", "Time from the parsed request to its end (JCT).", _SECONDS)
        self.itl = self._histogram("segue_itl_seconds", "Time between two text deltas of a request.", _BETWEEN_TOKENS)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, buckets=buckets, registry=self.registry)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self.registry)


def _encoded_audio(delta: Delta) -> bool:
    return isinstance(delta, EncodedDelta) and delta.kind == "audio"


class GenerationWatch:
    """Measure the latencies of one generation, which begins now, from its deltas. Close it when the generation ends."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start = metrics.clock()
        self._last_text: dict[int, float] = {}
        self._audio_began = False
        self._end = "aborted"
        metrics.generations_in_flight.inc()

    def saw(self, delta: Delta) -> None:
        """Record a delta at the moment it arrives."""
        now = self._metrics.clock()
        if isinstance(delta, TextDelta):
            if not self._last_text:
                self._metrics.ttft.observe(now - self._start)
            elif delta.index in self._last_text:
                self._metrics.itl.observe(now - self._last_text[delta.index])
            self._last_text[delta.index] = now
        elif not self._audio_began and (isinstance(delta, AudioDelta) or _encoded_audio(delta)):
            self._audio_began = True
            self._metrics.ttfa.observe(now - self._start)
        elif isinstance(delta, Finished):
            self._metrics.jct.observe(now - self._start)
            self._end = delta.finish_reason

    def failed(self, code: str) -> None:
        """Record that the generation ended in an error of this code."""
        self._end = code

    def close(self) -> None:
        self._metrics.generations_in_flight.dec()
        self._metrics.generations.labels(self._end).inc()
