"""Allocates an engine's resources at load: the cache, its ledger, and the dispatcher that runs the model on them."""

from __future__ import annotations

from dataclasses import dataclass

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.cache.memory import drafting_states, prefix_states, stored_as
from segue.engines.autoregressive.cache.states import Snapshots, StateSlots
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveModel, EmbedsInPlace, Prompt, YieldsRows
from segue.engines.autoregressive.schedule.bidirectional import longest_of
from segue.engines.autoregressive.schedule.decision import Limits
from segue.engines.autoregressive.schedule.policies import Accounts
from segue.engines.autoregressive.schedule.scheduler import Scheduler
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.autoregressive.step.advance import advance_of
from segue.engines.autoregressive.step.check import check_attention, check_bidirectional_served, check_states_served
from segue.engines.autoregressive.step.decode_graphs import recorded_decodes, recorded_lists
from segue.engines.autoregressive.step.dispatch import Dispatcher
from segue.engines.autoregressive.step.invariant import InvariantModel, check_invariant
from segue.engines.autoregressive.step.warm_up import warm_up
from segue.kernels.attention.backends.choose import attention_backend, records_while_serving
from segue.kernels.attention.interface import check_chunks
from segue.kernels.attention.paged_step import AttentionBackend
from segue.kernels.kv.states import StateStore
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError
from segue.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of an engine, which live as long as it does."""

    model: AutoregressiveModel
    config: AutoregressiveConfig
    store: KVStore
    states: StateStore | None
    """None for a decoder without state."""
    pool: BlockPool
    scheduler: Scheduler
    dispatcher: Dispatcher
    longest: int
    """Most tokens of a sequence without spans that must be in one step."""
    share_size: int
    """Block size for prefix sharing; 0: no sharing."""
    recorded: bool
    """Decode steps are replayed from captured graphs."""
    entire: bool
    """A prompt goes through the decoder in one step, because its states cannot be continued."""
    ranks: Ranks

    def warm_up(self) -> None:
        """Run small steps once, on a separate store; on a CPU, capture the graphs of decode steps."""
        hidden = warm_up(self.model, self.config, self.store.backend, ranks=self.ranks)
        if self.dispatcher.advance is not None:
            self.dispatcher.advance.warm_up(hidden, self.ranks)
        if self.recorded and records_while_serving(self.store.backend):
            self.dispatcher.graphs = recorded_lists(self.model, self.store, self.longest, self.config.max_batch)

    def longest_with(self, prompt: Prompt | None) -> int:
        """The most tokens that a sequence can have."""
        if prompt is None or not prompt.bidirectional or self.entire:
            return self.longest
        limits, most = self.scheduler.limits, self.model.max_model_len
        return limits.longest(self.config.num_blocks, most, longest_of(prompt.bidirectional))


def allocate(
    model: AutoregressiveModel, config: AutoregressiveConfig, speculation: Speculation | None, ranks: Ranks = ALONE
) -> Resources:
    """Allocate. Raises `ConfigError` for a model that cannot be served in flat batches or with this configuration."""
    backend = _backend(model, config, speculation)
    if config.deterministic:
        model = InvariantModel(model)
        check_invariant(model)
    spec = stored_as(model.kv, config.kv_dtype)
    layout = spec.layout(model.max_model_len)
    check_chunks(layout.windows, config.block_size)
    kept = spec.states
    # a captured graph would have to know the state slots that it reads
    recordable = kept is None and not spec.gathered
    recorded = backend is not None and backend.recordable and not config.enforce_eager and recordable
    store = KVStore(
        layout,
        num_blocks=config.num_blocks + recorded,  # graphs pad their batches with rows of an unowned block
        block_size=config.block_size,
        dtype=spec.dtype,
        stored=spec.stored,
        device=model.device,
        capture_width=spec.capture_width,
        capture_dtype=spec.capture_dtype,
        backend=backend,
    )
    pool = BlockPool(config.num_blocks)
    limits = Limits(
        config.block_size, config.max_batch, config.max_tokens_per_step, layout.windows, config.prefill_chunk
    )
    slots = None if kept is None else StateSlots(config.max_batch)
    snapshots, states, shares = None, None, config.prefix_caching
    if kept is not None and slots is not None:
        count = prefix_states(spec, config.max_batch, config.prefix_states, None, caching=config.prefix_caching)
        shares = count > 0
        count += drafting_states(config.max_batch, speculation is not None)
        snapshots = Snapshots(slots.total, count) if count else None
        states = StateStore(kept, slots.total + count, model.device)
    accounts = Accounts() if config.scheduling == "fair" else None
    entire = kept is not None and not kept.continues
    most = model.max_model_len
    longest = limits.longest(config.num_blocks, most, most if entire else 1)
    graphs = None
    if recorded and not records_while_serving(backend):
        graphs = recorded_decodes(model, store, longest, config.max_batch)
    share_size = config.block_size if shares else 0
    advance = advance_of(model, config.max_batch, eager=config.enforce_eager)
    return Resources(
        model=model,
        config=config,
        store=store,
        states=states,
        pool=pool,
        scheduler=Scheduler(pool, limits, accounts, slots, snapshots),
        dispatcher=Dispatcher(model, store, graphs, share_size, states, advance, ranks),
        longest=longest,
        share_size=share_size,
        recorded=recorded,
        entire=entire,
        ranks=ranks,
    )


def _backend(
    model: AutoregressiveModel, config: AutoregressiveConfig, speculation: Speculation | None
) -> AttentionBackend | None:
    """The attention backend, checked against the model."""
    if isinstance(model, YieldsRows) and speculation is not None:
        raise ConfigError("this model yields rows of codes, which have no drafts: leave it out", field="speculation")
    if model.kv.states is not None:
        check_states_served(model.kv.states, config.deterministic, speculation)
    if model.kv.cross_attends and config.deterministic:
        raise ConfigError(
            "layers of this model cross-attend to images, which deterministic does not support: tokens that attend to "
            "the same image are one call",
            field="deterministic",
        )
    if isinstance(model, EmbedsInPlace) and config.deterministic:
        raise ConfigError(
            "this model embeds its tokens by their place in a sequence, which deterministic does not support: its "
            "calls have a fixed number of rows",
            field="deterministic",
        )
    kernel = "torch" if config.deterministic else config.attention
    backend = attention_backend(kernel, model.device, config.block_size)
    if config.kv_dtype != "auto" and backend is not None and not backend.upcasts:
        raise ConfigError(f"attention {kernel!r} cannot read a cache in {config.kv_dtype}", field="kv_dtype")
    if model.kv.bidirectional:
        check_bidirectional_served(kernel, backend, model.kv.windows, deterministic=config.deterministic)
    check_attention(model, backend)
    return backend
