"""Change the speed of speech without its pitch, and its sample rate, as a stream of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import av
import av.filter
import numpy as np

from segue.media.encode import Blocks, Samples
from segue.messages.formats import FASTEST, SLOWEST

_LEAST, _MOST = 0.5, 2.0
"""What one `atempo` does without skipping samples; beyond it, two of them follow each other."""


class Reshaper:
    """FFmpeg's `atempo` (overlap-add of the waveform's own periods) and its resampler. With speed 1 and the same rate,
    samples pass unchanged."""

    def __init__(self, sample_rate: int, *, speed: float = 1.0, rate: int | None = None) -> None:
        """`speed`: `SLOWEST` to `FASTEST`, 2 is twice as fast; `rate`: of the result, None: `sample_rate`."""
        if not SLOWEST <= speed <= FASTEST:
            raise ValueError(f"speed {speed}, not {SLOWEST} to {FASTEST}")
        self.rate = sample_rate if rate is None else rate
        """Samples per second of the result."""
        self._given = sample_rate
        self._at = 0
        self._blocks = Blocks()
        self._graph = None if speed == 1.0 and self.rate == sample_rate else self._linked(speed)

    def feed(self, samples: Samples) -> Samples:
        """Return the samples that are ready; none while the filters fill their windows."""
        if self._graph is None:
            return samples
        for block in self._blocks.feed(samples):
            self._push(self._graph, block)
        return self._ready(self._graph)

    def _push(self, graph: av.filter.Graph, samples: Samples) -> None:
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None], np.float32), format="flt", layout="mono")
        frame.sample_rate = self._given
        frame.pts = self._at
        frame.time_base = Fraction(1, self._given)
        self._at += len(samples)
        graph.push(frame)

    def finish(self) -> Samples:
        """Return the rest. The reshaper cannot be used again."""
        if self._graph is None:
            return np.empty(0, np.float32)
        if len(rest := self._blocks.rest()):
            self._push(self._graph, rest)
        if not self._at:
            return np.empty(0, np.float32)
        self._graph.push(None)
        return self._ready(self._graph)

    def _linked(self, speed: float) -> av.filter.Graph:
        graph = av.filter.Graph()
        nodes = [graph.add_abuffer(sample_rate=self._given, format="flt", layout="mono")]
        if speed != 1.0:
            steps = [speed] if _LEAST <= speed <= _MOST else [math.sqrt(speed)] * 2
            nodes += [graph.add("atempo", str(step)) for step in steps]
        nodes.append(graph.add("aresample", str(self.rate)))
        nodes.append(graph.add("aformat", "sample_fmts=flt:channel_layouts=mono"))
        nodes.append(graph.add("abuffersink"))
        graph.link_nodes(*nodes).configure()
        return graph

    @staticmethod
    def _ready(graph: av.filter.Graph) -> Samples:
        pieces = list(_pulled(graph))
        return np.concatenate(pieces) if pieces else np.empty(0, np.float32)


def _pulled(graph: av.filter.Graph) -> Iterator[Samples]:
    while True:
        try:
            frame = graph.pull()
        except (av.BlockingIOError, av.EOFError):  # it needs more samples, or has given all
            return
        assert isinstance(frame, av.AudioFrame)
        yield frame.to_ndarray()[0].astype(np.float32, copy=False)
