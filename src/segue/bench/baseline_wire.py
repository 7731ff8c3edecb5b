"""What the benchmark and its baseline's process say to each other, beside what `segue.bench.channel` has."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, kw_only=True):
    """How the baseline is loaded; its process gets it as JSON in `argv`."""

    model_dir: str
    device: str
    dtype: str
    load_format: str
    threads: int
    suppressed_thinker: list[int]
    suppressed_talker: list[int]
    talker_ends: list[int]


class Policy(msgspec.Struct, tag=True):
    """Serve like this from now on."""

    max_batch: int
    gather: float
    """Seconds to wait for a batch to fill once a first request is there. Clients whose answers came in one batch send
    their next requests within milliseconds of each other: without it each batch would begin with the first alone."""


class Loaded(msgspec.Struct, tag=True):
    """The model is there."""

    threads: int


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer. Times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    batch: int
    """Requests that were served together with it, itself included."""
    began: float
    """Taken from the queue,"""
    prepared: float
    """processor done,"""
    first_token: float
    """first token of the reply known,"""
    thinker_done: float
    talker_done: float
    done: float
    """waveform there."""
    prompt_tokens: int
    text_ids: list[int]
    code_ids: list[int]
    samples: bytes
    """float32 little-endian mono."""
    sample_rate: int
    gpu_bytes: int = 0
    """Most GPU memory the process has held so far."""
