"""Compute how much the caches of an autoregressive stage hold.

Optional reading: called once, at load.
"""

from __future__ import annotations

from segue.engines.autoregressive.cache.memory import blocks_for, drafting_states, prefix_states, state_bytes, stored_as
from segue.engines.autoregressive.contract import AutoregressiveModel
from segue.engines.autoregressive.step.invariant import whole_kv
from segue.graph.kinds.autoregressive import AUTOREGRESSIVE, AutoregressivePlan
from segue.messages.errors import ConfigError
from segue.worker.kinds.autoregressive.drafters import LoadedDrafter


def states_to_keep(plan: AutoregressivePlan, model: AutoregressiveModel, drafter: LoadedDrafter | None) -> int:
    """Return the number of prefix states to keep."""
    budget = _cache_bytes(plan, model, drafter) if plan.memory_bytes else None
    return prefix_states(model.kv, plan.max_batch, plan.prefix_states, budget, caching=plan.prefix_caching)


def kv_blocks(
    plan: AutoregressivePlan, model: AutoregressiveModel, drafter: LoadedDrafter | None, snapshots: int
) -> int:
    """Return the deployment's number of KV blocks, else as many as fit next to the weights and all states, but no more
    than can ever be used.

    A drafter's own cache holds as many tokens.
    """
    if plan.kv_blocks is not None:
        return plan.kv_blocks
    spec = stored_as(whole_kv(model.kv) if plan.deterministic else model.kv, plan.kv_dtype)
    layout = spec.layout(model.max_model_len)
    most = layout.groups * plan.max_batch * -(-model.max_model_len // plan.block_size)
    if not plan.memory_bytes:
        return most
    room = _cache_bytes(plan, model, drafter)
    if room <= 0:
        weights = model.weight_bytes + (drafter.weight_bytes if drafter is not None else 0)
        raise ConfigError(
            f"stage {plan.name!r}: its weights take {weights} bytes, its memory_share is "
            f"{plan.memory_share} ({plan.memory_bytes} bytes); nothing is left for the KV cache",
            field=f"stages.{plan.name}.memory_share",
        )
    states = state_bytes(spec, plan.max_batch, snapshots + drafting_states(plan.max_batch, drafter is not None))
    if states >= room:
        lower = "max_batch" if plan.prefix_states is None else "max_batch or prefix_states"
        raise ConfigError(
            f"stage {plan.name!r}: max_batch is {plan.max_batch}, and the states of that many sequences and of "
            f"{snapshots} prefixes take {states} bytes; {room} bytes are left for them and the KV cache; give a "
            f"lower {lower}",
            field=f"stages.{plan.name}.max_batch",
        )
    elsewhere = drafter.bytes_per_block(plan.block_size) if drafter is not None else 0
    return blocks_for(room - states, spec, layout, plan.block_size, elsewhere, most=most)


def _cache_bytes(plan: AutoregressivePlan, model: AutoregressiveModel, drafter: LoadedDrafter | None) -> int:
    """Return the stage's memory that its weights leave for caches; 0 or negative if they take all of it."""
    weights = model.weight_bytes + (drafter.weight_bytes if drafter is not None else 0)
    return int((plan.memory_bytes - weights) * AUTOREGRESSIVE.cache_share)
