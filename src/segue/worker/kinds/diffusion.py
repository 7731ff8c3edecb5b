"""The diffusion kind in a worker."""

from __future__ import annotations

import socket
from pathlib import Path

from segue.engines.contract import Engine, LoadContext, StageModel
from segue.engines.diffusion.contract import DenoiserContext, DiffusionModel
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.engines.diffusion.follower import follow_rows
from segue.engines.diffusion.ranks import RowLeader
from segue.graph.kinds.diffusion import DiffusionPlan
from segue.graph.kinds.kind import extended
from segue.messages.errors import ConfigError
from segue.parallel.orders import Crew
from segue.parallel.ways import Shape, meet
from segue.worker.kinds.kind import Host, RankRoles, WorkerKind


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
    return DiffusionEngine(model, DiffusionConfig(max_batch=plan.max_batch, memory_bytes=plan.memory_bytes or None))


def _meet(context: DenoiserContext, plan: DiffusionPlan, rank: int, meeting: Path) -> None:
    shape = Shape(plan.cfg_parallel, plan.sequence_parallel, plan.tensor_parallel)
    context.ways = meet(rank, shape, meeting, context.device)


def _lead(model: StageModel, context: DenoiserContext, crew: Crew) -> RowLeader:
    assert context.ways is not None, "ranks have met"
    return RowLeader(model, context.ways, crew)


def _follow(model: StageModel, context: DenoiserContext, plan: DiffusionPlan, orders: socket.socket) -> None:
    assert context.ways is not None, "ranks have met"
    follow_rows(model, context.ways, orders)


KIND = WorkerKind(
    contract=DiffusionModel,
    context=_context,
    build=_build,
    ranks=RankRoles(_meet, _lead, _follow),
)
