"""What the text benchmark and the process of its `transformers` baseline say to each other: msgpack behind a length."""

from __future__ import annotations

import asyncio

import msgspec

from segue.bench.baseline_wire import LENGTH
from segue.bench.text_workload import TextRequest


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


class Work(msgspec.Struct, tag=True):
    request: TextRequest


class Loaded(msgspec.Struct, tag=True):
    """The model is there."""

    threads: int


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer; times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    token_ids: list[int]
    times: list[float]
    """When the process had each token."""


class Broken(msgspec.Struct, tag=True):
    """The process cannot go on."""

    message: str


ToReference = Policy | Work
FromReference = Loaded | Answer | Broken

_encoder = msgspec.msgpack.Encoder()
to_reference = msgspec.msgpack.Decoder(ToReference)
from_reference = msgspec.msgpack.Decoder(FromReference)


def frame(message: ToReference | FromReference) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> FromReference | None:
    """The next message, None at the end of the stream."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return from_reference.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
