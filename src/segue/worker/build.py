"""From a `WorkerSpec` to loaded stages: devices, adapters, engines, connectors."""

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
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveAdapter, LoraHost, TakesLora
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar import Grammars
from segue.engines.autoregressive.grammar_process import CompilerHome
from segue.engines.autoregressive.invariant import whole_kv
from segue.engines.autoregressive.memory import blocks_for, drafting_states, prefix_states, state_bytes, stored_as
from segue.engines.autoregressive.ranks import Leader
from segue.engines.autoregressive.speculation.contract import OpenTarget
from segue.engines.contract import Adapter, AdapterFactory, Engine, LoadContext
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.engines.diffusion.ranks import RowLeader
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.graph.deployment import EdgePlan, Limits, StagePlan
from segue.graph.stage_graph import INPUT
from segue.kernels.compiled import compile_layers
from segue.kernels.memory import give_back
from segue.messages.errors import ConfigError
from segue.messages.process import WorkerSpec
from segue.messages.sampling import SamplingParams
from segue.messages.wire import Loading, StageFacts
from segue.models.family import Family
from segue.models.registry import families
from segue.worker.device_memory import on_device
from segue.worker.drafters import LoadedDrafter, load_drafter
from segue.worker.outbox import Channel
from segue.worker.ranks import Ranks, load_context, threads_of
from segue.worker.retained import RetainedStore
from segue.worker.stage import StageRunner

CACHE_SHARE = 0.8
"""Of the memory left beside the weights; the rest is for activations."""


@dataclass(slots=True)
class Built:
    """Everything a worker's loop runs on."""

    stages: dict[str, StageRunner]
    channels: dict[tuple[str, str], Channel]
    """Edges that leave a stage of this worker."""
    inbound: dict[tuple[str, str], Connector]
    """Edges that arrive at one."""
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
    """Load every stage of this worker. Raises what loading raises; the caller reports it.

    `ranks`: where its one stage has several processes. `home`: where grammars are compiled. `wake` is called from
    another thread when an engine has work that no message brought.
    """
    family = families()[spec.family]
    plans = [msgspec.convert(stage, StagePlan) for stage in spec.stages]
    edges = [msgspec.convert(edge, EdgePlan) for edge in spec.edges]
    limits = msgspec.convert(spec.limits, Limits)
    torch.set_num_threads(max(map(threads_of, plans)))
    device = torch.device(plans[0].device_of(spec.replica))
    _work_on(device)
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
        factory = _of(stages_module.ADAPTERS, plan.name, family, "ADAPTERS")
        adapter = _adapter(factory, context, ranks)
        give_back()
        defaults = SamplingParams()
        facts[plan.name] = StageFacts()
        if plan.engine == "autoregressive":
            defaults = adapter.default_sampling
            facts[plan.name] = StageFacts(max_model_len=adapter.max_model_len, vocab_size=adapter.vocab_size)
        transfers = {
            edge.target: _of(stages_module.TRANSFERS, (edge.source, edge.target), family, "TRANSFERS")
            for edge in edges
            if edge.source == plan.name
        }
        if plan.compile and plan.engine != "diffusion":  # a denoiser compiles itself
            _compile(plan, adapter, context.device)
        engine = _engine(plan, adapter, context, wake, home)
        progress(0.9, "warming up")
        with torch.inference_mode():
            engine.warm_up()
        if isinstance(adapter, Leader | RowLeader):
            adapter.serve()
        stages[plan.name] = StageRunner(plan, engine, transfers, defaults, _lora_host(plan, adapter))
    channels, inbound, connectors = _connect(spec, edges, set(stages), _device_memory(spec, plans))
    retained = RetainedStore(limits.retained_bytes, str(Path(spec.connector).parent))
    return Built(stages, channels, inbound, connectors, retained, facts)


K = TypeVar("K")
V = TypeVar("V")


def _of(entries: Mapping[K, V], key: K, family: Family, name: str) -> V:
    """An entry of a family's `stages` module. Raises `ConfigError` where there is none."""
    if key not in entries:
        raise ConfigError(
            f"{family.stages_module}.{name} has no {key!r}, which is in the graph of the family {family.name!r}; it "
            f"has {', '.join(map(repr, entries)) or 'nothing'}"
        )
    return entries[key]


def _work_on(device: torch.device) -> None:
    """Stages of a worker share their device. It becomes this process's own: kernels that are not torch's are launched
    there, and memory is pinned there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _compile(plan: StagePlan, adapter: Adapter, device: torch.device) -> None:
    """Have the decoder compiled by the check and the warm-up that follow. Raises `ConfigError` where it cannot be."""
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
            raise ConfigError(f"stage {plan.name!r}: compile does not go with {other}; leave one out", field=field)
    if plan.engine != "autoregressive" or not isinstance(adapter, OpenTarget):
        raise ConfigError(f"stage {plan.name!r}: compile is true, but it shows no decoder to compile", field=field)
    compile_layers(adapter.library_decoder, device.type)


def _adapter(factory: AdapterFactory, context: LoadContext, ranks: Ranks | None) -> Adapter:
    """The stage's adapter, over all its ranks."""
    if ranks is None:
        return factory(context)
    ranks.meet(context)
    if context.ways is not None:
        return RowLeader(factory(context), context.ways, ranks.crew)
    assert context.group is not None, "ranks have met"
    return Leader(factory(context), context.group, ranks.crew)


def _lora_host(plan: StagePlan, adapter: Adapter) -> LoraHost | None:
    """Who keeps the adapters of a stage that has any. Families say what they can do (`Family.stage_keys`)."""
    if plan.lora is None:
        return None
    assert isinstance(adapter, TakesLora), f"the family of stage {plan.name!r} takes no LoRA adapters"
    return adapter.lora


def _media_limits(limits: Limits) -> dict[str, float]:
    """The deployment's bounds on media, by the names of `segue.media.limits.MediaLimits`."""
    return {
        "max_bytes": limits.max_media_bytes,
        "max_image_pixels": limits.max_image_pixels,
        "max_audio_seconds": limits.max_audio_seconds,
        "max_video_frames": limits.max_video_frames,
    }


def _output_limits(limits: Limits) -> dict[str, int]:
    """The deployment's bounds on what is made, by the names of `segue.models.diffusion.limits.OutputLimits`."""
    return {
        "max_output_pixels": limits.max_output_pixels,
        "max_inference_steps": limits.max_inference_steps,
        "max_output_frames": limits.max_output_frames,
        "max_outputs": limits.max_outputs,
    }


def _engine(
    plan: StagePlan, adapter: Adapter, context: LoadContext, wake: Callable[[], None], home: CompilerHome | None
) -> Engine:
    match plan.engine:
        case "autoregressive":
            drafter = load_drafter(plan, adapter, context)
            states = _prefix_states(plan, adapter, drafter)
            num_blocks = _kv_blocks(plan, adapter, drafter, states)
            speculation = None
            if drafter is not None and plan.speculation is not None:
                groups = adapter.kv.layout(adapter.max_model_len).groups
                speculation = drafter.speculation(plan.speculation, -(-num_blocks // groups))
            return AutoregressiveEngine(
                adapter,
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
                    or (plan.compile and context.device.type == "cpu")  # compiled code is one piece already
                    or (drafter is not None and drafter.eager),
                ),
                Grammars.of(adapter, wake, home),
                speculation,
            )
        case "diffusion":
            return DiffusionEngine(
                adapter, DiffusionConfig(max_batch=plan.max_batch, memory_bytes=plan.memory_bytes or None)
            )
        case "module":
            return ModuleEngine(adapter, ModuleConfig(max_batch=plan.max_batch))
        case other:
            raise ConfigError(f"stage {plan.name!r}: there is no {other} engine in this version", stage=plan.name)


def _cache_bytes(plan: StagePlan, adapter: AutoregressiveAdapter, drafter: LoadedDrafter | None) -> int:
    """What the stage's memory leaves for caches, beside the weights: nothing, or less, where these take it all."""
    weights = adapter.weight_bytes + (drafter.weight_bytes if drafter is not None else 0)
    return int((plan.memory_bytes - weights) * CACHE_SHARE)


def _prefix_states(plan: StagePlan, adapter: AutoregressiveAdapter, drafter: LoadedDrafter | None) -> int:
    """How many states of prefixes are kept."""
    budget = _cache_bytes(plan, adapter, drafter) if plan.memory_bytes else None
    return prefix_states(adapter.kv, plan.max_batch, plan.prefix_states, budget, caching=plan.prefix_caching)


def _kv_blocks(plan: StagePlan, adapter: AutoregressiveAdapter, drafter: LoadedDrafter | None, snapshots: int) -> int:
    """What the deployment says; else what its memory holds beside the weights and all states, but no more than can ever
    be used.

    A drafter with a cache of its own has room for as many tokens.
    """
    if plan.kv_blocks is not None:
        return plan.kv_blocks
    spec = stored_as(whole_kv(adapter.kv) if plan.deterministic else adapter.kv, plan.kv_dtype)
    layout = spec.layout(adapter.max_model_len)
    most = layout.groups * plan.max_batch * -(-adapter.max_model_len // plan.block_size)
    if not plan.memory_bytes:
        return most
    room = _cache_bytes(plan, adapter, drafter)
    if room <= 0:
        weights = adapter.weight_bytes + (drafter.weight_bytes if drafter is not None else 0)
        raise ConfigError(
            f"stage {plan.name!r}: its weights take {weights} bytes, its memory_share is "
            f"{plan.memory_share} ({plan.memory_bytes} bytes); nothing is left for the KV cache",
            field=f"stages.{plan.name}.memory_share",
        )
    states = state_bytes(spec, plan.max_batch, snapshots + drafting_states(plan.max_batch, drafter is not None))
    if states >= room:
        lower = "max_batch" if plan.prefix_states is None else "max_batch or prefix_states"
        raise ConfigError(
            f"stage {plan.name!r}: max_batch is {plan.max_batch}, and the states of so many sequences and of "
            f"{snapshots} prefixes take {states} bytes; {room} bytes are left for them and the KV cache; give a "
            f"lower {lower}",
            field=f"stages.{plan.name}.max_batch",
        )
    beside = drafter.bytes_per_block(plan.block_size) if drafter is not None else 0
    return blocks_for(room - states, spec, layout, plan.block_size, beside, most=most)


def _device_memory(spec: WorkerSpec, plans: list[StagePlan]) -> DeviceMemory | None:
    """What this worker shares of its device; the first, should its stages be on several."""
    for plan in plans:
        device = torch.device(plan.device_of(spec.replica))
        if device.type == "cuda":
            return cuda_memory(device)
    return None


def _connect(
    spec: WorkerSpec, edges: list[EdgePlan], mine: set[str], device: DeviceMemory | None
) -> tuple[dict[tuple[str, str], Channel], dict[tuple[str, str], Connector], list[Connector]]:
    """One connector per name in the deployment, shared by all edges that name it."""
    made: dict[tuple[str, str], Connector] = {}
    inline = create("shm", f"{spec.connector}i", {"shm_threshold_bytes": sys.maxsize, "pool_bytes": PAGE})
    channels: dict[tuple[str, str], Channel] = {}
    inbound: dict[tuple[str, str], Connector] = {}
    for edge in edges:
        key = (edge.kind, edge.connector)
        if key not in made:
            # between fused stages nothing is copied: a bound on bytes would save no memory, and could stop a request
            # that waits for the rest of its own input
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
