"""Say what a further worker of each stage would cost in memory, from what the plan knows."""

from __future__ import annotations

from collections.abc import Mapping

from segue.graph.deployment.deployment import MiB, Plan
from segue.graph.kinds.registry import kind_of, shares_weights
from segue.graph.parts import is_built_in
from segue.graph.render import table


def further_workers(plan: Plan, weights: Mapping[str, int]) -> str:
    """Return a table with a row for each worker that has weights. `weights`: stage → bytes of its weights as published,
    as far as they are known."""
    rows = [["a further worker", "weights", "caches", "activations", "together"]]
    rows += [_row(plan, group, weights) for group in plan.groups if not all(map(is_built_in, group))]
    return "\n".join(table(rows)) + "\n"


def _row(plan: Plan, group: tuple[str, ...], weights: Mapping[str, int]) -> list[str]:
    stages = [plan.stages[name] for name in group]
    places = [stages[0].place_of(replica) for replica in range(stages[0].replicas + 1)]
    shared = all(shares_weights(stage, places.count(places[-1])) for stage in stages)
    known = all(name in weights for name in group)
    mine = sum(weights[name] for name in group) if known else 0
    written = _size(mine) if known else "not known"
    written = f"shared ({written})" if shared else written
    whole = sum(stage.memory_bytes * stage.ranks for stage in stages)
    if not whole:  # of the device
        return [" + ".join(group), written, *["not known"] * 3]
    if not known:
        return [" + ".join(group), written, "not known", "not known", f"at most {_size(whole)}"]
    left = [max(0, stage.memory_bytes * stage.ranks - weights[stage.name]) for stage in stages]
    caches = int(sum(kind_of(stage.engine).cache_share * size for stage, size in zip(stages, left, strict=True)))
    rest = sum(left)
    together = rest if shared else rest + mine
    return [" + ".join(group), written, *(_most(size) for size in (caches, rest - caches, together))]


def _most(size: int) -> str:
    return f"at most {_size(size)}" if size else "-"


def _size(count: int) -> str:
    return f"{count / MiB:.0f} MiB" if count < 1024 * MiB else f"{count / MiB / 1024:.1f} GiB"
