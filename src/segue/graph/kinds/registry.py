"""Find an engine kind by its name. Other packages register kinds through the entry-point group `segue.engines`: the
entry point is an `EngineKind`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import msgspec

from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.autoregressive import AUTOREGRESSIVE
from segue.graph.kinds.diffusion import DIFFUSION
from segue.graph.kinds.kind import EngineKind
from segue.graph.kinds.module import MODULE
from segue.graph.parts import is_input
from segue.graph.plugins import plugins
from segue.messages.errors import ConfigError


@cache
def kinds() -> Mapping[str, EngineKind[Any]]:
    """Return all known kinds by name: the built-in ones, then those of installed packages. Raises `ConfigError` for a
    name that two have."""
    built_in: tuple[EngineKind[Any], ...] = (
        AUTOREGRESSIVE,
        DIFFUSION,
        MODULE,
    )
    known = {kind.name: kind for kind in built_in}
    for kind in plugins("segue.engines", EngineKind):
        if kind.name in known:
            raise ConfigError(f"two engine kinds are called {kind.name!r}; the package must give its own another name")
        known[kind.name] = kind
    return known


def kind_of(engine: str) -> EngineKind[Any]:
    """Return the kind with this name, which a validated graph or plan has."""
    return kinds()[engine]


def shares_weights(stage: StagePlan, workers: int) -> bool:
    """Whether so many workers of a stage on one device of one host share their weights: several, of one process
    each."""
    alone = workers == 1 or stage.ranks > 1
    return not alone and not is_input(stage.name) and kind_of(stage.engine).shares_weights


def plan_from(values: Mapping[str, Any]) -> StagePlan:
    """Return the plan of a stage from plain values (`msgspec.to_builtins`), in the type of its kind."""
    return cast(StagePlan, msgspec.convert(values, kind_of(values["engine"]).plan))


@cache
def kind_keys() -> tuple[str, ...]:
    """Return the deployment keys of all kinds, each once."""
    return tuple(dict.fromkeys(key for kind in kinds().values() for key in kind.keys))


@cache
def rank_keys() -> tuple[str, ...]:
    """Return the keys of all kinds that give a replica several processes, each once."""
    return tuple(dict.fromkeys(key for kind in kinds().values() for key in kind.rank_keys))
