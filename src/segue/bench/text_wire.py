"""What the text benchmark and the process of its `transformers` baseline say to each other, beside what
`segue.bench.channel` has."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, kw_only=True):
    """How the model is loaded; the process gets it as JSON in `argv`."""

    model_dir: str
    dtype: str
    threads: int


class Policy(msgspec.Struct, tag=True):
    """Serve like this from now on."""

    way: str
    """`one`: one at a time; `static`: `generate` on padded batches; `continuous`: `generate_batch`."""
    most: int
    """Requests per call."""
    gather: float
    """Seconds to wait for a batch to fill once a first request is there."""


class Loaded(msgspec.Struct, tag=True):
    """The model is there."""


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer; times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    token_ids: list[int]
    times: list[float]
    """When the process had each token."""
