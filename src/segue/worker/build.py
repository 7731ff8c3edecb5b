"""Build a worker from its `WorkerSpec`: devices, stage models, engines, connectors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from segue.connectors.base import Connector
from segue.connectors.create import create
from segue.connectors.cuda import cuda_memory
from segue.connectors.device import DeviceMemory
from segue.connectors.segment import PAGE
from segue.engines.autoregressive.cache.memory import blocks_for, drafting_states, prefix_states, state_bytes, stored_as
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveModel, LoraHost, TakesLora
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.grammar.process import CompilerHome
from segue.engines.autoregressive.parallel.ranks import Leader
from segue.engines.autoregressive.speculation.contract import OpenTarget
from segue.engines.autoregressive.step.invariant import whole_kv
from segue.engines.contract import Engine, LoadContext, StageModel, StageModelFactory
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.engines.diffusion.ranks import RowLeader
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.graph.deployment.deployment import EdgePlan, Limits, StagePlan
from segue.graph.stage_graph import INPUT
from segue.kernels.device import give_back
from segue.kernels.graphs.compiled import compile_layers
from segue.messages.errors import ConfigError
from segue.messages.process import WorkerSpec
from segue.messages.sampling import SamplingParams
from segue.messages.wire import Loading, StageFacts
from segue.models.family import Family
from segue.models.registry import families
from segue.worker.device import on_device, work_on
from segue.worker.drafters import LoadedDrafter, load_drafter
from segue.worker.outbox import Channel
from segue.worker.ranks import Ranks, load_context, threads_of
from segue.worker.retained import RetainedStore
from segue.worker.stage import StageRunner

CACHE_SHARE = 0.8
"""Share for caches of the memory that the weights leave; the rest is for activations."""


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


def build(
    spec: WorkerSpec,
    report: Callable[[Loading], None],
    wake: Callable[[], None],
    ranks: Ranks | None = None,
    home: CompilerHome | None = None,
) -> Built:
    """Load every stage of this worker. Exceptions of loading propagate; the caller reports them.

    `ranks`: set if its one stage has several processes. `home`: the process that compiles grammars. `wake` is called
    from another thread when an engine has work that no message caused.
    """
    family = families()[spec.family]
    plans = [msgspec.convert(stage, StagePlan) for stage in spec.stages]
    edges = [msgspec.convert(edge, EdgePlan) for edge in spec.edges]
    limits = msgspec.convert(spec.limits, Limits)
    torch.set_num_threads(max(map(threads_of, plans)))
    device = torch.device(plans[0].device_of(spec.replica))
    work_on(device)  # all stages of a worker share it
    plans = [on_device(plan, device) for plan in plans]
    stages_module = family.load_stages()
    stages: dict[str, StageRunner] = {}
    facts: dict[str, StageFacts] = {}
    for number, plan in enumerate(plans):

        def progress(fraction: float, what: str, number: int = number, name: str = plan.name) -> None:
            report(Loading(spec.worker, (number + fraction) / len(plans), f"{name}: {what}"))

        progress(0.0, "loading")
        context = load_context(spec, plan)
        context.progress = progress
        if plan.name == INPUT:
            context.options["limits"] = _media_limits(limits)
            context.options["output_limits"] = _output_limits(limits)
            context.options["max_prompt_embeds_bytes"] = limits.max_prompt_embeds_bytes
        factory = _of(stages_module.STAGE_MODELS, plan.name, family, "ADAPTERS")
        model = _model(factory, context, ranks)
        give_back()
        defaults = SamplingParams()
        facts[plan.name] = StageFacts()
        if plan.engine == "autoregressive":
            defaults = model.default_sampling
            facts[plan.name] = StageFacts(max_model_len=model.max_model_len, vocab_size=model.vocab_size)
        transfers = {
            edge.target: _of(stages_module.TRANSFERS, (edge.source, edge.target), family, "TRANSFERS")
            for edge in edges
            if edge.source == plan.name
        }
        if plan.compile and plan.engine != "diffusion":  # a denoiser compiles itself
            _compile(plan, model, context.device)
        engine = _engine(plan, model, context, wake, home)
        progress(0.9, "warming up")
        with torch.inference_mode():
            engine.warm_up()
        if isinstance(model, Leader | RowLeader):
            model.serve()
        stages[plan.name] = StageRunner(plan, engine, transfers, defaults, _lora_host(plan, model))
    channels, inbound, connectors = _connect(spec, edges, set(stages), _device_memory(spec, plans))
    retained = RetainedStore(limits.retained_bytes, str(Path(spec.connector).parent))
    return Built(stages, channels, inbound, connectors, retained, facts)


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


def _compile(plan: StagePlan, model: StageModel, device: torch.device) -> None:
    """Mark the decoder for compilation, which the following warm-up does. Raises `ConfigError` if it is impossible."""
    field = f"stages.{plan.name}.compile"
    hooked = plan.speculation is not None and plan.speculation.method == "eagle"
    for other, given in (
        ("enforce_eager", plan.enforce_eager),
        ("deterministic", plan.deterministic),
        ("EAGLE", hooked),
        ("tensor_parallel", plan.tensor_parallel > 1),
        ("quantization", plan.quantization != "none"),
    ):
        if given:
            raise ConfigError(f"stage {plan.name!r}: compile does not work with {other}; leave one out", field=field)
    if plan.engine != "autoregressive" or not isinstance(model, OpenTarget):
        raise ConfigError(f"stage {plan.name!r}: compile is true, but the model has no decoder to compile", field=field)
    compile_layers(model.library_decoder, device.type)


def _model(factory: StageModelFactory, context: LoadContext, ranks: Ranks | None) -> StageModel:
    """Load the stage model, on all its ranks."""
    if ranks is None:
        return factory(context)
    ranks.meet(context)
    if context.ways is not None:
        return RowLeader(factory(context), context.ways, ranks.crew)
    assert context.group is not None, "ranks have met"
    return Leader(factory(context), context.group, ranks.crew)


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


def _engine(
    plan: StagePlan, model: StageModel, context: LoadContext, wake: Callable[[], None], home: CompilerHome | None
) -> Engine:
    match plan.engine:
        case "autoregressive":
            drafter = load_drafter(plan, model, context)
            states = _prefix_states(plan, model, drafter)
            num_blocks = _kv_blocks(plan, model, drafter, states)
            speculation = None
            if drafter is not None and plan.speculation is not None:
                groups = model.kv.layout(model.max_model_len).groups
                speculation = drafter.speculation(plan.speculation, -(-num_blocks // groups))
            return AutoregressiveEngine(
                model,
                AutoregressiveConfig(
                    num_blocks=num_blocks,
                    block_size=plan.block_size,
                    max_batch=plan.max_batch,
                    max_tokens_per_step=plan.max_tokens_per_step,
                    prefill_chunk=plan.prefill_chunk,
                    prefix_caching=plan.prefix_caching,
                    prefix_states=states,
                    deterministic=plan.deterministic,
                    max_logprobs=plan.max_logprobs,
                    scheduling=plan.scheduling,
                    attention=plan.attention,
                    kv_dtype=plan.kv_dtype,
                    enforce_eager=plan.enforce_eager
                    or plan.tensor_parallel > 1
                    or (plan.compile and context.device.type == "cpu")  # compiled code already runs as one piece
                    or (drafter is not None and drafter.eager),
                ),
                Grammars.of(model, wake, home),
                speculation,
            )
        case "diffusion":
            return DiffusionEngine(
                model, DiffusionConfig(max_batch=plan.max_batch, memory_bytes=plan.memory_bytes or None)
            )
        case "module":
            return ModuleEngine(model, ModuleConfig(max_batch=plan.max_batch))
        case other:
            raise ConfigError(f"stage {plan.name!r}: there is no {other} engine in this version", stage=plan.name)


def _cache_bytes(plan: StagePlan, model: AutoregressiveModel, drafter: LoadedDrafter | None) -> int:
    """Return the stage's memory that its weights leave for caches; 0 or negative if they take all of it."""
    weights = model.weight_bytes + (drafter.weight_bytes if drafter is not None else 0)
    return int((plan.memory_bytes - weights) * CACHE_SHARE)


def _prefix_states(plan: StagePlan, model: AutoregressiveModel, drafter: LoadedDrafter | None) -> int:
    """Return the number of prefix states to keep."""
    budget = _cache_bytes(plan, model, drafter) if plan.memory_bytes else None
    return prefix_states(model.kv, plan.max_batch, plan.prefix_states, budget, caching=plan.prefix_caching)


def _kv_blocks(plan: StagePlan, model: AutoregressiveModel, drafter: LoadedDrafter | None, snapshots: int) -> int:
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
    beside = drafter.bytes_per_block(plan.block_size) if drafter is not None else 0
    return blocks_for(room - states, spec, layout, plan.block_size, beside, most=most)


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
    channels: dict[tuple[str, str], Channel] = {}
    inbound: dict[tuple[str, str], Connector] = {}
    for edge in edges:
        key = (edge.kind, edge.connector)
        if key not in made:
            # fused stages copy nothing: a bound on bytes would save no memory, but could block a request that waits
            # for the rest of its own input
            extra = {"max_bytes": sys.maxsize} if edge.kind == "inproc" else dict(edge.extra)
            made[key] = create(edge.kind, f"{spec.connector}{len(made)}", extra, device)
        if edge.source in mine:
            fused = edge.kind == "inproc"
            channels[edge.source, edge.target] = Channel(
                made[key], None if fused else inline, edge.budget, retain=not fused
            )
        if edge.target in mine:
            inbound[edge.source, edge.target] = made[key]
    return channels, inbound, [*made.values(), inline]
