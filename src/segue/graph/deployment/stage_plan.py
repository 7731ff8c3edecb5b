"""What the plan of every stage has, whichever engine runs it; each engine kind adds its own fields
(`segue.graph.kinds`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from segue.graph.deployment.options import LoraPlan
from segue.messages.addresses import SERVER
from segue.messages.sampling import SamplingParams

CPU = "cpu"
ROUTINGS = ("load", "prefix", "session")
"""What the choice of a replica may go by."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The range in which a stage's number of workers follows its load."""

    least: int
    most: int
    queue_age: float
    """The objective: another worker starts when a request has waited in the queue for this many seconds."""
    idle: float = 60.0
    """A worker ends when one fewer would have been enough for this many seconds."""
    cooldown: float = 10.0
    """Seconds between two changes of this stage."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage, resolved: only values that depend on its weights are still open."""

    name: str
    engine: str
    """Name of its engine kind."""
    devices: tuple[str, ...]
    """`cpu` or `cuda:N`; all of one kind."""
    replicas: int
    """At the start."""
    memory_share: float
    """Fraction of its device's memory, per replica; 0 if the stage keeps nothing that must be sized."""
    memory_bytes: int
    """`memory_share` in bytes; 0 if the device's memory is unknown until a worker runs there."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    threads: int
    """CPU threads of the worker; equal for fused stages."""
    max_batch: int
    routing: tuple[str, ...] = ("load",)
    """The choice of a replica for a request goes by the first of these `ROUTINGS`, the next breaks its ties; equal for
    fused stages."""
    node: tuple[str, ...] = (SERVER,)
    """The hosts that its replicas run on, in turn; equal for fused stages."""
    scaling: Scaling | None = None
    """None: the number of workers is fixed; equal for fused stages."""
    load_format: str = "auto"
    """`auto` or `dummy`."""
    options: dict[str, Any] = field(default_factory=dict)
    scheduling: str = "fcfs"
    """Order of requests: one of the `scheduling` choices of its kind."""
    lora: LoraPlan | None = None
    """None: the stage takes no adapters."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Fields that the deployment sets; the others are None."""

    @property
    def ranks(self) -> int:
        """Number of processes of each replica."""
        return 1

    @property
    def asked_of_family(self) -> tuple[str, ...]:
        """Keys that the plan sets and that the family must support (`Family.stage_keys`)."""
        return ()

    def node_of(self, replica: int) -> str:
        """Return the node of replica number `replica` (from 0)."""
        return self.node[replica % len(self.node)]

    def device_of(self, replica: int, rank: int = 0) -> str:
        """Return the device of rank `rank` of replica number `replica` (both from 0)."""
        return self.devices[(replica * self.ranks + rank) % len(self.devices)]

    def place_of(self, replica: int) -> tuple[str, str]:
        """Return the node and (of rank 0) the device of replica number `replica` (from 0)."""
        return self.node_of(replica), self.device_of(replica)
