"""What the diffusion benchmark and the process of its `diffusers` baseline say to each other, beside what
`segue.bench.channel` has."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, kw_only=True):
    """How the pipeline is loaded; the process gets it as JSON in `argv`."""

    model_dir: str
    dtype: str
    threads: int
    sizes: list[int]
    """Of pictures, in pixels: what one call of the network costs is counted for each."""


class Policy(msgspec.Struct, tag=True):
    """Serve like this from now on."""

    most: int
    """Requests per call of the pipeline; only those with equal numbers of steps share one."""
    gather: float
    """Seconds to wait for a batch to fill once a first request is there."""


class Loaded(msgspec.Struct, tag=True):
    """The pipeline is there."""

    versions: dict[str, str]
    flops: dict[int, float]
    """By size: floating-point operations of one call of the network for one row."""
    ceiling: float
    """Operations per second of a product of two large matrices, with as many threads."""


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One picture."""

    index: int
    picture: bytes
    network: float = 0.0
    """Seconds of the network's calls for it: its part of those it shared."""
