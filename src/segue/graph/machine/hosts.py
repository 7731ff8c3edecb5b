"""Fit the stages of another host to the hardware that it turns out to have."""

from __future__ import annotations

from dataclasses import replace

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.stage_plan import CPU, StagePlan
from segue.graph.plan.memory_shares import bytes_of
from segue.graph.plan.placement import Worker, share_threads
from segue.messages.errors import ConfigError


def stages_on(plan: Plan, node: str, found: Hardware) -> dict[str, StagePlan]:
    """Return the plans of a node's stages, with its memory and cores. Raises `ConfigError` that names a stage which
    does not fit it."""
    workers = []
    for group in plan.groups:
        first = plan.stages[group[0]]
        count = first.replicas if first.scaling is None else first.scaling.most
        here = [index for index in range(count) if first.node_of(index) == node]
        if not here:
            continue
        devices = dict.fromkeys(first.device_of(index, rank) for index in here for rank in range(first.ranks))
        for device in devices:
            _check(group[0], device, node, found)
        said = any("threads" in plan.said.get(name, {}) for name in group)
        workers.append(Worker(group, first.threads if said else None, tuple(devices), len(here)))
    threads = share_threads(plan.graph, workers, found)
    fitted = {}
    for worker in workers:
        for stage in (plan.stages[name] for name in worker.group):
            size = bytes_of(stage.memory_share, worker.devices, stage.ranks, found)
            fitted[stage.name] = replace(stage, threads=threads[worker.group], memory_bytes=size)
    return fitted


def _check(stage: str, device: str, node: str, found: Hardware) -> None:
    if device == CPU or int(device.removeprefix("cuda:")) < len(found.gpus):
        return
    count = len(found.gpus)
    has = f"{count} GPU{'s' if count != 1 else ''}" if count else "no GPU that can be used"
    notes = f" ({'; '.join(found.gpu_notes)})" if found.gpu_notes else ""
    raise ConfigError(
        f"stage {stage!r} is on {device} of node {node!r}, which has {has}{notes}: set devices of the stage, or say "
        "under `nodes` of the deployment what the node has",
        field=f"stages.{stage}.devices",
    )
