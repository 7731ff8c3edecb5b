"""Messages between the orchestrator and the fork server, and the `WorkerSpec` from which a worker starts."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.addresses import Network


class ModelSource(msgspec.Struct):
    """Where a worker loads its stages from."""

    family: str
    model_dir: str
    transforms: list[str] | None = None
    """In a graph of models, for one that gets its input from others: the functions that turn their outputs into its
    input (`segue.graph.functions`). None: the model takes nothing but clients' requests."""


class WorkerSpec(msgspec.Struct, kw_only=True):
    """One worker: the stages it runs and the addresses of its peers."""

    worker: str
    """Unique per incarnation, e.g. `thinker.0-2`: group, replica, incarnation."""
    replica: int
    """Index of this replica in its group, from 0."""
    family: str
    model_dir: str
    stages: list[dict[str, Any]]
    """`segue.graph.deployment.stage_plan.StagePlan` of each, in the type of its engine kind, as plain values."""
    edges: list[dict[str, Any]]
    """`segue.graph.deployment.deployment.EdgePlan` of every edge that starts or ends here."""
    replayable: list[str]
    """Stages whose new attempt gives the same chunks in the same pieces (`EngineKind.replayable`), so that a receiver
    drops repeated chunks by number. Autoregressive stages do not promise it (prefill chunks depend on the load): their
    rows carry their own index."""
    limits: dict[str, Any]
    inbox: str
    """ZeroMQ address this worker binds."""
    orchestrator: str
    """ZeroMQ address the orchestrator has bound."""
    connector: str
    """Address of this worker's shared-memory connector."""
    load_format: str = "auto"
    transforms: list[str] | None = None
    """As in `ModelSource`."""
    shared: dict[str, str] = {}
    """Stages whose weights it shares with other workers → the device."""
    skip_tokenizer_init: bool = False
    network: Network | None = None
    """None: all workers are on one host."""


class Spawn(msgspec.Struct, tag=True):
    spec: WorkerSpec


class Kill(msgspec.Struct, tag=True):
    pid: int


class Preloaded(msgspec.Struct, tag=True):
    """The fork server has imported the modules that workers share."""

    no_kernels: str = ""
    """Why there are no compiled kernels for the CPU; empty if there are."""


class PreloadFailed(msgspec.Struct, tag=True):
    message: str


class Spawned(msgspec.Struct, tag=True):
    worker: str
    pid: int


class Exited(msgspec.Struct, tag=True):
    worker: str
    pid: int
    how: str
    """`exit 1`, `signal 9 (SIGKILL)`"""


ToForkServer = Spawn | Kill
FromForkServer = Preloaded | PreloadFailed | Spawned | Exited

MESSAGE_BYTES = 1 << 18
"""Largest packet, in bytes."""

_encoder = msgspec.msgpack.Encoder()
to_fork_server = msgspec.msgpack.Decoder(ToForkServer)
from_fork_server = msgspec.msgpack.Decoder(FromForkServer)


def encode(message: ToForkServer | FromForkServer) -> bytes:
    return _encoder.encode(message)
