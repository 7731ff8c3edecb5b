"""Build a worker from its `WorkerSpec`: devices, stage models, engines, connectors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec
import torch

from segue.connectors.base import Connector
from segue.connectors.create import Network, create
from segue.connectors.device.cuda import cuda_memory
from segue.connectors.device.memory import DeviceMemory
from segue.connectors.shm.segment import PAGE
from segue.engines.autoregressive.contract import LoraHost, TakesLora
from segue.engines.contract import HasVoices, LoadContext, SameWorker, StageModel, StageModelFactory
from segue.graph.deployment.deployment import EdgePlan, Limits
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.registry import plan_from
from segue.graph.parts import OUTPUT, is_input, own_name
from segue.kernels.device import give_back_on
from segue.messages.errors import ConfigError
from segue.messages.process import WorkerSpec
from segue.messages.wire import Loading, StageFacts
from segue.models.family import Family
from segue.models.registry import families
from segue.worker.bridge import Bridge
from segue.worker.edges.outbox import CHUNK_BYTES, Channel
from segue.worker.edges.retained import RetainedStore
from segue.worker.file_maker import FileMaker
from segue.worker.kinds.kind import Host, check_contract, worker_kind
from segue.worker.process.device import on_device, work_on
from segue.worker.process.ranks import Followers, load_context, threads_of
from segue.worker.process.shared_weights import load_shared
from segue.worker.process.weights_store import WeightsStore
from segue.worker.stage import StageRunner


@dataclass(slots=True)
class Built:
    """Everything that a worker's loop needs."""

    stages: dict[str, StageRunner]
    channels: dict[tuple[str, str], Channel]
    """Edges that leave a stage of this worker."""
    inbound: dict[tuple[str, str], Connector]
    """Edges that lead to a stage of this worker."""
    connectors: list[Connector]
    retained: RetainedStore
    facts: dict[str, StageFacts]
    shared_bytes: int = 0
    """Weights that are shared with other workers."""


def build(
    spec: WorkerSpec,
    report: Callable[[Loading], None],
    host: Host,
    ranks: Followers | None = None,
    weights: Mapping[str, WeightsStore] = MappingProxyType({}),
) -> Built:
    """Load every stage of this worker. Exceptions of loading propagate; the caller reports them.

    `host`: what the worker offers its engines. `ranks`: set if its one stage has several processes. `weights`:
    stores of the weights that it shares with other workers, by stage.
    """
    family = families()[spec.family]
    plans = [plan_from(stage) for stage in spec.stages]
    edges = [msgspec.convert(edge, EdgePlan) for edge in spec.edges]
    limits = msgspec.convert(spec.limits, Limits)
    torch.set_num_threads(max(map(threads_of, plans)))
    device = torch.device(plans[0].device_of(spec.replica))
    work_on(device)  # all stages of a worker share it
    plans = [on_device(plan, device) for plan in plans]
    stages_module = family.load_stages()
    stages: dict[str, StageRunner] = {}
    facts: dict[str, StageFacts] = {}
    shared_bytes = 0
    same_worker = SameWorker(frozenset(own_name(plan.name) for plan in plans))
    for number, plan in enumerate(plans):

        def progress(fraction: float, what: str, number: int = number, name: str = plan.name) -> None:
            report(Loading(spec.worker, (number + fraction) / len(plans), f"{name}: {what}"))

        progress(0.0, "loading")
        context = load_context(spec, plan)
        context.progress = progress
        context.same_worker = same_worker
        if is_input(plan.name):
            context.options["limits"] = _media_limits(limits)
            context.options["output_limits"] = _output_limits(limits)
            context.options["max_prompt_embeds_bytes"] = limits.max_prompt_embeds_bytes
        own = own_name(plan.name)
        factory = FileMaker if own == OUTPUT else _of(stages_module.STAGE_MODELS, own, family, "STAGE_MODELS")
        load = partial(_model, factory, context, plan, ranks)
        store = weights.get(plan.name)
        model, shared = (load(), 0) if store is None else load_shared(store, device, load)
        shared_bytes += shared
        if is_input(plan.name) and spec.transforms is not None:
            model = Bridge(model, spec.transforms, chats=family.chats(context.model_dir))
        give_back_on(device)
        kind = worker_kind(plan.engine)
        facts[plan.name] = kind.facts(model)
        if isinstance(model, HasVoices):
            facts[plan.name] = msgspec.structs.replace(facts[plan.name], voices=_voices(model, plan))
        transfers = {
            target: _of(stages_module.TRANSFERS, (own, own_name(target)), family, "TRANSFERS")
            for target in (edge.target for edge in edges if edge.source == plan.name)
            if own_name(target) != OUTPUT
        }
        engine = kind.build(plan, model, context, host if ranks is None else replace(host, ranks=ranks.link))
        same_worker.models[own], same_worker.engines[own] = model, engine
        progress(0.9, "warming up")
        with torch.inference_mode():
            engine.warm_up()
        lora = _lora_host(plan, model)
        if ranks is not None:
            engine = ranks.leading(engine)
            lora = None if lora is None else ranks.adapters(lora)
        stages[plan.name] = StageRunner(plan, engine, transfers, kind.sampling(model), lora)
    channels, inbound, connectors = _connect(spec, edges, set(stages), _device_memory(spec, plans))
    retained = RetainedStore(limits.retained_bytes, str(Path(spec.connector).parent))
    return Built(stages, channels, inbound, connectors, retained, facts, shared_bytes)


K = TypeVar("K")
V = TypeVar("V")


def _of(entries: Mapping[K, V], key: K, family: Family, name: str) -> V:
    """Return an entry of a family's `stages` module. Raises `ConfigError` if there is none."""
    if key not in entries:
        raise ConfigError(
            f"{family.stages_module}.{name} has no {key!r}, which is in the graph of the family {family.name!r}; it "
            f"has {', '.join(map(repr, entries)) or 'nothing'}"
        )
    return entries[key]


def _voices(model: HasVoices, plan: StagePlan) -> list[str]:
    if callable(model.voices) or not all(isinstance(name, str) for name in model.voices):
        raise ConfigError(f"stage {plan.name!r}: voices of its stage model must be a sequence of names")
    return list(model.voices)


def _model(factory: StageModelFactory, context: LoadContext, plan: StagePlan, ranks: Followers | None) -> StageModel:
    """Load the stage model, on all its ranks."""
    if ranks is not None:
        ranks.meet(context)
    model = factory(context)
    check_contract(plan, model)
    return model


def _lora_host(plan: StagePlan, model: StageModel) -> LoraHost | None:
    """Return the host of a stage's LoRA adapters, or None. `Family.stage_keys` says whether a family supports them."""
    if plan.lora is None:
        return None
    assert isinstance(model, TakesLora), f"the family of stage {plan.name!r} takes no LoRA adapters"
    return model.lora


def _media_limits(limits: Limits) -> dict[str, float]:
    """Return the deployment's bounds on media under the names of `segue.media.limits.MediaLimits`."""
    same = (
        "max_image_pixels",
        "max_audio_seconds",
        "max_video_seconds",
        "max_video_frames",
        "max_request_pixels",
        "max_decoded_pixels",
        "max_decode_seconds",
    )
    own = {"max_items": limits.max_media_parts, "max_bytes": limits.max_media_bytes}
    return {**own, **{name: getattr(limits, name) for name in same}}


def _output_limits(limits: Limits) -> dict[str, int]:
    """Return the deployment's bounds on outputs by the names of `segue.models.shared.diffusion.input.OutputLimits`."""
    return {
        "max_output_pixels": limits.max_output_pixels,
        "max_inference_steps": limits.max_inference_steps,
        "max_output_frames": limits.max_output_frames,
        "max_outputs": limits.max_outputs,
    }


def _device_memory(spec: WorkerSpec, plans: list[StagePlan]) -> DeviceMemory | None:
    """Return the shareable memory of this worker's CUDA device (the first one, if there are several), or None."""
    for plan in plans:
        device = torch.device(plan.device_of(spec.replica))
        if device.type == "cuda":
            return cuda_memory(device)
    return None


def _connect(
    spec: WorkerSpec, edges: list[EdgePlan], mine: set[str], device: DeviceMemory | None
) -> tuple[dict[tuple[str, str], Channel], dict[tuple[str, str], Connector], list[Connector]]:
    """Create one connector per name in the deployment, shared by all edges that name it."""
    made: dict[tuple[str, str], Connector] = {}
    inline = create("shm", f"{spec.connector}i", {"shm_threshold_bytes": sys.maxsize, "pool_bytes": PAGE})
    network = None
    if spec.network is not None:
        as_bfloat16 = frozenset((edge.source, edge.target) for edge in edges if edge.wire == "bfloat16")
        network = Network(spec.network.host, spec.network.key, as_bfloat16)
    channels: dict[tuple[str, str], Channel] = {}
    inbound: dict[tuple[str, str], Connector] = {}
    for edge in edges:
        key = (edge.kind, edge.connector)
        if key not in made:
            # fused stages copy nothing: a bound on bytes would save no memory, but could block a request that waits
            # for the rest of its own input
            extra = {"max_bytes": sys.maxsize} if edge.kind == "inproc" else dict(edge.extra)
            receives = any(other.target in mine and (other.kind, other.connector) == key for other in edges)
            made[key] = create(edge.kind, f"{spec.connector}{len(made)}", extra, device, network, receives=receives)
        if edge.source in mine:
            fused = edge.kind == "inproc"
            channels[edge.source, edge.target] = Channel(
                made[key],
                None if fused else inline,
                edge.budget,
                retain=not fused,
                overhead=CHUNK_BYTES,
                start=edge.start,
            )
        if edge.target in mine:
            inbound[edge.source, edge.target] = made[key]
    return channels, inbound, [*made.values(), inline]
