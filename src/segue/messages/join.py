"""Messages between a server and the agents of the hosts that join it (`segue join`), and how their token becomes keys.

    agent → server   Join, NodeReady, NodeFailed, News, Beat, Leave
    server → agent   Welcome, Refused, Order, Beat, Fenced

Messages change from one version of Segue to the next, and from one commit to the next, so that both sides refuse a peer
whose `wire_version` is another.

A node has a generation, which grows each time it joins. Every message carries it: a host that was cut off and taken for
lost receives `Fenced` when it comes back, ends its workers and joins anew.

Optional reading: only a server whose hosts join exchanges them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from segue.messages.process import Exited, Kill, Spawn, Spawned
from segue.messages.wire import ToOrchestrator, ToWorker

BEAT_SECONDS = 1.0
"""Between two signs of life, in both directions."""
LOST_SECONDS = 10.0
"""A node, or a server, that gives no sign of life for this long is lost."""
PORT = 8900


class NodeHardware(msgspec.Struct):
    """What a node has, within its cgroups; memory in bytes."""

    cpus: int
    memory_bytes: int
    gpus: list[int]
    """Memory of each; 0: unknown until a worker runs there."""
    gpu_names: list[str]
    gpu_notes: list[str]


class Join(msgspec.Struct, tag=True):
    node: str
    version: str
    """Of Segue; both sides must have the same."""
    wire: str = ""
    """The node's `wire_version`; both sides must have the same."""
    hardware: NodeHardware | None = None
    """None: the node is older than that."""


class Welcome(msgspec.Struct, tag=True):
    generation: int
    preload: list[str]
    """Modules that the node's fork server imports."""
    gpus: bool
    """Whether workers may need GPUs."""
    wire: str = ""
    """The server's `wire_version`; empty: it is older than that."""


class Refused(msgspec.Struct, tag=True):
    reason: str
    final: bool
    """Asking again does not help."""


class Fenced(msgspec.Struct, tag=True):
    """The sender's generation is over."""


class NodeReady(msgspec.Struct, tag=True):
    """Workers can be spawned on the node."""

    generation: int
    runtime_dir: str
    host: str
    """The address by which the node's workers are reached."""


class NodeFailed(msgspec.Struct, tag=True):
    """The node cannot run workers."""

    generation: int
    message: str


class News(msgspec.Struct, tag=True):
    generation: int
    news: Spawned | Exited


class Order(msgspec.Struct, tag=True):
    generation: int
    order: Spawn | Kill


class Beat(msgspec.Struct, tag=True):
    generation: int
    sent: int
    """Messages that the sender has sent in this generation: `Order`, or `NodeReady` and `News`. A receiver that got
    fewer knows that some were lost with a connection, and ends the generation."""


class Leave(msgspec.Struct, tag=True):
    """The node leaves; its workers have ended."""

    generation: int


ToServer = Join | NodeReady | NodeFailed | News | Beat | Leave
ToAgent = Welcome | Refused | Order | Beat | Fenced

_encoder = msgspec.msgpack.Encoder()
to_server = msgspec.msgpack.Decoder(ToServer)
to_agent = msgspec.msgpack.Decoder(ToAgent)


def encode(message: ToServer | ToAgent) -> bytes:
    return _encoder.encode(message)


def wire_version() -> str:
    """Return the version of the messages between hosts, those of `segue.messages.wire` and of this module."""
    return schema_hash(ToServer, ToAgent, ToWorker, ToOrchestrator)


def schema_hash(*types: Any) -> str:
    """Return a hash of the names, tags, fields and types of messages, also of those that they contain."""
    seen: dict[str, Any] = {}
    messages = _described(msgspec.inspect.multi_type_info(types), seen)
    return hashlib.sha256(json.dumps([messages, seen], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _described(part: Any, seen: dict[str, Any]) -> Any:
    """Return a part of a `msgspec.inspect` type as JSON. `seen`: name of each struct in it → its fields."""
    if isinstance(part, msgspec.inspect.StructType):
        name = part.cls.__qualname__
        if name not in seen:
            seen[name] = None  # a struct may contain itself
            fields = [(field.encode_name, field.required, _described(field.type, seen)) for field in part.fields]
            seen[name] = [part.tag_field, part.tag, part.array_like, fields]
        return name
    if isinstance(part, msgspec.inspect.Type):
        values = ((name, getattr(part, name)) for name in part.__struct_fields__)
        return [type(part).__name__, {name: _described(value, seen) for name, value in values if value is not None}]
    return [_described(one, seen) for one in part] if isinstance(part, list | tuple) else part


def secret_of(token: str) -> bytes:
    """Return the 32 bytes of the CurveZMQ secret key that a token stands for; who has the token has both keys."""
    return hashlib.sha256(b"segue join " + token.encode()).digest()


class Listen(msgspec.Struct, frozen=True):
    """Where a server waits for hosts that join."""

    host: str
    """The address of one interface of this machine: the join port, the inboxes and the payloads are served there."""
    port: int
    token: str
