"""The autoregressive kind in a worker."""

from __future__ import annotations

from pathlib import Path

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contexts.contract import ReadsContexts
from segue.engines.autoregressive.contexts.engine import ContextEngine
from segue.engines.autoregressive.contract import AutoregressiveContext, AutoregressiveModel
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.speculation.contract import OpenTarget
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.contract import Engine, LoadContext, StageModel
from segue.graph.kinds.autoregressive import AutoregressivePlan
from segue.graph.kinds.kind import extended
from segue.kernels.graphs.compiled import compile_layers
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.messages.wire import StageFacts
from segue.parallel.group import Group
from segue.worker.kinds.autoregressive.cache_size import kv_blocks, states_to_keep
from segue.worker.kinds.autoregressive.drafters import LoadedDrafter, load_drafter
from segue.worker.kinds.kind import Host, WorkerKind


def _context(base: LoadContext, plan: AutoregressivePlan) -> AutoregressiveContext:
    return extended(
        AutoregressiveContext,
        base,
        max_model_len=plan.max_model_len,
        quantization=plan.quantization,
        fused=not (plan.enforce_eager or plan.compile),
    )


def _facts(model: AutoregressiveModel) -> StageFacts:
    return StageFacts(max_model_len=model.max_model_len, vocab_size=model.vocab_size)


def _sampling(model: AutoregressiveModel) -> SamplingParams:
    return model.default_sampling


def _build(plan: AutoregressivePlan, model: StageModel, context: AutoregressiveContext, host: Host) -> Engine:
    """Each rank runs this; the caches are as large as rank 0's, which also has the drafter."""
    if plan.compile:
        _compile(plan, model, context)
    drafter = load_drafter(plan, model, context) if host.ranks.first else None
    config = host.ranks.same(lambda: _config(plan, model, context, drafter), AutoregressiveConfig)
    speculation = None
    if host.ranks.same(lambda: drafter is not None, bool) and plan.speculation is not None:
        groups = model.kv.layout(model.max_model_len).groups
        num_blocks = -(-config.num_blocks // groups)
        speculation = (
            Speculation(None, plan.speculation.tokens)
            if drafter is None
            else drafter.speculation(plan.speculation, num_blocks)
        )
    grammars = Grammars.of(model, host.wake, host.home)
    engine = AutoregressiveEngine(model, config, grammars, speculation, ranks=host.ranks)
    return ContextEngine(engine, model) if isinstance(model, ReadsContexts) else engine


def _config(
    plan: AutoregressivePlan, model: AutoregressiveModel, context: AutoregressiveContext, drafter: LoadedDrafter | None
) -> AutoregressiveConfig:
    states = states_to_keep(plan, model, drafter)
    return AutoregressiveConfig(
        num_blocks=kv_blocks(plan, model, drafter, states),
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
        hold_seconds=plan.hold_seconds,
        enforce_eager=plan.enforce_eager
        or plan.tensor_parallel > 1
        or (plan.compile and context.device.type == "cpu")  # compiled code already runs as one piece
        or (drafter is not None and drafter.eager),
    )


def _compile(plan: AutoregressivePlan, model: StageModel, context: AutoregressiveContext) -> None:
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
    if not isinstance(model, OpenTarget):
        raise ConfigError(f"stage {plan.name!r}: compile is true, but the model has no decoder to compile", field=field)
    compile_layers(model.library_decoder, context.device.type)


def _meet(context: AutoregressiveContext, plan: AutoregressivePlan, rank: int, meeting: Path) -> Group:
    context.group = Group(rank, plan.ranks, meeting, context.device)
    return context.group


KIND = WorkerKind(
    contract=AutoregressiveModel,
    context=_context,
    build=_build,
    facts=_facts,
    sampling=_sampling,
    meet=_meet,
)
