"""Messages between the diffusion benchmark and the process of its `diffusers` baseline, in addition to those of
`segue.bench.harness.channel`."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, kw_only=True):
    """Options for loading the pipeline; the process receives them as JSON in `argv`."""

    model_dir: str
    dtype: str
    threads: int
    sizes: list[int]
    """Sizes of images in pixels, for which the operations of one network call are counted."""


class Policy(msgspec.Struct, tag=True):
    """Sets the way of serving from now on."""

    most: int
    """Maximum requests per call of the pipeline; only those with equal numbers of steps share one."""
    gather: float
    """Seconds to wait for a batch to fill after its first request."""


class Loaded(msgspec.Struct, tag=True):
    """The pipeline is loaded."""

    versions: dict[str, str]
    flops: dict[int, float]
    """By size: floating-point operations of one call of the network for one row."""
    ceiling: float
    """Operations per second of a matmul of two large matrices, with the same number of threads."""


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One image."""

    index: int
    image: bytes
    network: float = 0.0
    """Seconds of the network's calls for it: its share of calls with several images."""
