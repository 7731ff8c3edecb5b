"""The diffusion kind in a worker."""

from __future__ import annotations

from pathlib import Path

from segue.engines.contract import Engine, LoadContext, StageModel
from segue.engines.diffusion.contract import DenoiserContext, DiffusionModel
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.engines.diffusion.sharing import Sharing
from segue.graph.kinds.diffusion import DiffusionPlan
from segue.graph.kinds.kind import extended
from segue.messages.errors import ConfigError
from segue.parallel.group import Group
from segue.parallel.ways import Shape, meet
from segue.worker.kinds.kind import Host, WorkerKind


def _context(base: LoadContext, plan: DiffusionPlan) -> DenoiserContext:
    if plan.offload != "none" and base.device.type == "cpu":
        raise ConfigError(
            f"stage {plan.name!r}: offload is {plan.offload!r}, but the stage runs on the CPU, where its weights are "
            "already; it must be none",
            field=f"stages.{plan.name}.offload",
        )
    return extended(
        DenoiserContext,
        base,
        quantization=plan.quantization,
        gguf=dict(plan.gguf),
        attention=plan.attention,
        compile=plan.compile,
        offload=plan.offload,
        sequence_ring=plan.sequence_ring,
        fused=not (plan.enforce_eager or plan.compile),
        recorded=not plan.enforce_eager,
    )


def _build(plan: DiffusionPlan, model: StageModel, context: DenoiserContext, host: Host) -> Engine:
    config = host.ranks.same(
        lambda: DiffusionConfig(max_batch=plan.max_batch, memory_bytes=plan.memory_bytes or None), DiffusionConfig
    )
    sharing = None if context.ways is None else Sharing(model, context.ways, host.ranks)
    return DiffusionEngine(model, config, sharing, host.ranks)


def _meet(context: DenoiserContext, plan: DiffusionPlan, rank: int, meeting: Path) -> Group:
    shape = Shape(plan.cfg_parallel, plan.sequence_parallel, plan.tensor_parallel)
    context.ways = meet(rank, shape, meeting, context.device)
    return context.ways.everyone


KIND = WorkerKind(
    contract=DiffusionModel,
    context=_context,
    build=_build,
    meet=_meet,
)
