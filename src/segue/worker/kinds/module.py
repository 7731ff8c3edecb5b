"""The module kind in a worker."""

from __future__ import annotations

from segue.engines.contract import Engine, LoadContext, StageModel
from segue.engines.module.contract import ModuleModel
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.graph.kinds.module import ModulePlan
from segue.messages.errors import ConfigError
from segue.worker.kinds.kind import Host, WorkerKind


def _context(base: LoadContext, plan: ModulePlan) -> LoadContext:
    base.max_model_len = plan.max_model_len
    return base


def _build(plan: ModulePlan, model: StageModel, context: LoadContext, host: Host) -> Engine:
    if plan.compile:
        raise ConfigError(
            f"stage {plan.name!r}: compile is true, but the model has no decoder to compile",
            field=f"stages.{plan.name}.compile",
        )
    config = ModuleConfig(
        max_batch=plan.max_batch,
        max_first=1 if context.device.type == "cpu" else None,
        min_batch=plan.min_batch,
        batch_wait=plan.batch_wait,
    )
    return ModuleEngine(model, config, host.wake)


KIND = WorkerKind(contract=ModuleModel, context=_context, build=_build)
