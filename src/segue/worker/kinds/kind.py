"""What a worker knows about an engine kind: how to build and run the stages that have it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from segue.engines.autoregressive.grammar.process import CompilerHome
from segue.engines.contract import Engine, LoadContext, StageModel
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.registry import kind_of
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.messages.wire import StageFacts
from segue.parallel.group import Group
from segue.parallel.ranks import ALONE, Ranks

P = TypeVar("P", bound=StagePlan)
C = TypeVar("C", bound=LoadContext)


@dataclass(frozen=True)
class Host:
    """What a worker offers the engines of its stages."""

    wake: Callable[[], None] = lambda: None
    """Wakes the worker's loop, from any thread, when an engine has work that no message caused."""
    home: CompilerHome | None = None
    """The process that compiles grammars; None: this one."""
    ranks: Ranks = ALONE
    """The ranks of its one stage, each of which builds the same engine."""


@dataclass(frozen=True)
class WorkerKind(Generic[P, C]):
    """One kind of engine in a worker."""

    contract: type[Any]
    """The Protocol of its stage models."""
    context: Callable[[LoadContext, P], C]
    """(fields of every stage, plan) → what a stage model is built from. Raises `ConfigError` for keys that its device
    does not support."""
    build: Callable[[P, StageModel, C, Host], Engine]
    """Build the engine of a loaded stage model. Raises `ConfigError`."""
    facts: Callable[[StageModel], StageFacts] = lambda model: StageFacts()
    """What the orchestrator learns from a stage model."""
    sampling: Callable[[StageModel], SamplingParams] = lambda model: SamplingParams()
    """The sampling defaults of a stage model."""
    meet: Callable[[C, P, int, Path], Group] | None = None
    """(context, plan, rank, meeting place) → sets the process groups of the context when all ranks of a replica have
    met, and returns that of them all. The engine then is a `RankedEngine`. None: its stages run in one process."""


def worker_kind(engine: str) -> WorkerKind[Any, Any]:
    """Import the worker's half of an engine kind."""
    found: WorkerKind[Any, Any] = importlib.import_module(kind_of(engine).worker).KIND
    return found


def check_contract(plan: StagePlan, model: StageModel) -> None:
    """Raise `ConfigError` if a stage model lacks a member of its kind's contract."""
    contract = worker_kind(plan.engine).contract
    members = sorted({*contract.__annotations__, *(name for name in vars(contract) if not name.startswith("_"))})
    missing = [name for name in members if not hasattr(model, name)]
    if missing:
        raise ConfigError(
            f"stage {plan.name!r}: its stage model {type(model).__name__} has no {', '.join(missing)}; the "
            f"{plan.engine} engine needs a {contract.__module__}.{contract.__qualname__}"
        )
