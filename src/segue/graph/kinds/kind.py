"""The description of an engine kind: everything about it that is known without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from segue.graph.deployment.section import Section
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.parts import Stage

P = TypeVar("P", bound=StagePlan)
T = TypeVar("T")

ORDERS = ("fcfs", "priority")
"""Values of `scheduling` of a kind without others of its own."""


@dataclass(frozen=True)
class EngineKind(Generic[P]):
    """One kind of engine. The orchestrator and the plan read these facts and never compare names."""

    name: str
    """The engine's name in stage graphs, listings and errors."""
    plan: type[P]
    """Type of its stages' plans: the fields of every stage, and its own."""
    resolve: Callable[[StagePlan, Section, Mapping[str, str]], P]
    """(fields of every stage, the stage's section, its values of `choices`) → the stage's plan. Raises `ConfigError`
    with the key's path."""
    worker: str
    """Module, imported by workers only, whose `KIND` is a `segue.worker.kinds.kind.WorkerKind`: the contract of its
    stage models, and the function that builds its engine."""
    keys: tuple[str, ...] = ()
    """Deployment keys of its stages besides those of every stage."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"scheduling": ORDERS})
    """Keys whose values differ between kinds → its values, the default first. A value under `defaults` that only
    another kind has counts as not set."""
    max_batch: int = 16
    """Default of the key `max_batch`."""
    weight: int = 3
    """Estimate of a stage's need of resources relative to other stages."""
    weight_of_main: int = 6
    """The same for the stage that makes the main output."""
    rank_keys: tuple[str, ...] = ()
    """Keys that give a replica several processes."""
    ranks: Callable[[str, Stage, Section], int | None] = lambda graph, stage, section: None
    """(name of the graph, stage, its section) → processes per replica; None: not set. Raises `ConfigError`."""
    check_defaults: Callable[[Section], None] = lambda section: None
    """Check the values of its own keys under `defaults` for a graph that has no stage of this kind. Raises
    `ConfigError`."""
    samples: bool = False
    """Its stages sample tokens: requests have sampling parameters for them, and the token ids they emit are
    journalled."""
    holds: bool = False
    """Its engine `Holds`: a stage that loops return to goes on from the sequence of the visit before."""
    replayable: bool = False
    """A new attempt of its stages gives the same chunks in the same pieces, so that a receiver drops repeated chunks by
    number."""
    shares_weights: bool = False
    """The weights of its stages have their final form once the stage model is built: replicas on one device
    share them."""
    cache_share: float = 0.0
    """Share for its stages' caches of the memory that the weights leave; the rest is for activations."""
    dominant: bool = False
    """Nearly all of a request's time goes into its stages, so other workers get no CPU core of their own."""


def extended(kind: type[T], base: Any, **own: Any) -> T:
    """Return an instance of a dataclass that extends the class of `base`: its fields and those in `own`, which win."""
    return kind(**{field.name: getattr(base, field.name) for field in fields(base)} | own)
