"""What the benchmark and its baseline's process say to each other: msgpack behind a length, over a socket pair."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from segue.bench.workload import BenchRequest

LENGTH = struct.Struct("<I")


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


class Work(msgspec.Struct, tag=True):
    request: BenchRequest


class Loaded(msgspec.Struct, tag=True):
    """The model is there."""

    threads: int
    seconds: float
    """Loading took so long."""
    versions: dict[str, str]
    gpu_bytes: int = 0


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


class Broken(msgspec.Struct, tag=True):
    """The process cannot go on."""

    message: str


ToBaseline = Policy | Work
FromBaseline = Loaded | Answer | Broken

_encoder = msgspec.msgpack.Encoder()
to_baseline = msgspec.msgpack.Decoder(ToBaseline)
from_baseline = msgspec.msgpack.Decoder(FromBaseline)


def frame(message: ToBaseline | FromBaseline) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> FromBaseline | None:
    """The next message, None at the end of the stream."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return from_baseline.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
