"""What an engine allocates when it loads: the cache, the books over it, and what runs the model on them."""

from __future__ import annotations

from dataclasses import dataclass

from segue.engines.autoregressive.blocks import BlockPool
from segue.engines.autoregressive.check import check_attention, check_mutual_served, check_states_served
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveAdapter, Prompt
from segue.engines.autoregressive.decode_graphs import recorded_decodes, recorded_lists
from segue.engines.autoregressive.invariant import InvariantAdapter, check_invariant
from segue.engines.autoregressive.jobs import Limits
from segue.engines.autoregressive.launch import Launcher
from segue.engines.autoregressive.memory import drafting_states, prefix_states, stored_as
from segue.engines.autoregressive.mutual import longest_of
from segue.engines.autoregressive.policies import Accounts
from segue.engines.autoregressive.scheduler import Scheduler
from segue.engines.autoregressive.slots import StateSlots
from segue.engines.autoregressive.snapshots import Snapshots
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.autoregressive.warm_up import warm_up
from segue.kernels.backends import attention_backend
from segue.kernels.kv_store import KVStore
from segue.kernels.look_back import check_chunks
from segue.kernels.native_attention import NativeAttention
from segue.kernels.paged_step import AttentionBackend
from segue.kernels.state_store import StateStore
from segue.messages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Resources:
    """They live as long as the engine."""

    adapter: AutoregressiveAdapter
    config: AutoregressiveConfig
    store: KVStore
    states: StateStore | None
    """Where the decoder keeps any."""
    pool: BlockPool
    scheduler: Scheduler
    launcher: Launcher
    longest: int
    """Tokens that a sequence can have, where no span of it must be in one step."""
    share_size: int
    """Tokens of a block that others can share; 0: none can."""
    recorded: bool
    """Steps of single tokens are played back."""
    entire: bool
    """A prompt goes through the decoder in one step: its states cannot be continued."""

    def warm_up(self) -> None:
        """Run small steps once, on a store of their own; on a CPU, record those of single tokens."""
        warm_up(self.adapter, self.config, self.store.backend)
        if self.recorded and isinstance(self.store.backend, NativeAttention):
            self.launcher.graphs = recorded_lists(self.adapter, self.store, self.longest, self.config.max_batch)

    def longest_with(self, prompt: Prompt | None) -> int:
        """The most tokens that a sequence can have."""
        if prompt is None or not prompt.mutual or self.entire:
            return self.longest
        limits, most = self.scheduler.limits, self.adapter.max_model_len
        return limits.longest(self.config.num_blocks, most, longest_of(prompt.mutual))


def allocate(
    adapter: AutoregressiveAdapter, config: AutoregressiveConfig, speculation: Speculation | None
) -> Resources:
    """Raises `ConfigError` for a model that cannot be served in flat batches, or not with this configuration."""
    backend = _backend(adapter, config, speculation)
    if config.deterministic:
        adapter = InvariantAdapter(adapter)
        check_invariant(adapter)
    spec = stored_as(adapter.kv, config.kv_dtype)
    layout = spec.layout(adapter.max_model_len)
    check_chunks(layout.windows, config.block_size)
    kept = spec.states
    # a recording would have to know which slots it reads
    recordable = kept is None and not spec.gathered
    recorded = backend is not None and backend.recordable and not config.enforce_eager and recordable
    store = spec.store(
        layout,
        num_blocks=config.num_blocks + recorded,  # recordings pad their batches with rows of a block of nobody
        block_size=config.block_size,
        dtype=spec.dtype,
        stored=spec.stored,
        device=adapter.device,
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
        states = spec.state_store(kept, slots.total + count, adapter.device)
    accounts = Accounts() if config.scheduling == "fair" else None
    entire = kept is not None and not kept.continues
    most = adapter.max_model_len
    longest = limits.longest(config.num_blocks, most, most if entire else 1)
    graphs = None
    if recorded and not isinstance(backend, NativeAttention):
        graphs = recorded_decodes(adapter, store, longest, config.max_batch)
    share_size = config.block_size if shares else 0
    return Resources(
        adapter=adapter,
        config=config,
        store=store,
        states=states,
        pool=pool,
        scheduler=Scheduler(pool, limits, accounts, slots, snapshots),
        launcher=Launcher(adapter, store, graphs, share_size, states),
        longest=longest,
        share_size=share_size,
        recorded=recorded,
        entire=entire,
    )


def _backend(
    adapter: AutoregressiveAdapter, config: AutoregressiveConfig, speculation: Speculation | None
) -> AttentionBackend | None:
    """What computes attention, checked against the model."""
    if adapter.kv.states is not None:
        check_states_served(adapter.kv.states, config.deterministic, speculation)
    if adapter.kv.beside and config.deterministic:
        raise ConfigError(
            "layers of this model look at pictures, which deterministic cannot do: tokens that see the same picture "
            "are one call",
            field="deterministic",
        )
    kernel = "torch" if config.deterministic else config.attention
    backend = attention_backend(kernel, adapter.device, config.block_size)
    if config.kv_dtype != "auto" and backend is not None and not backend.widens:
        raise ConfigError(f"attention {kernel!r} cannot read a cache in {config.kv_dtype}", field="kv_dtype")
    if adapter.kv.mutual:
        check_mutual_served(kernel, backend, adapter.kv.windows, deterministic=config.deterministic)
    check_attention(adapter, backend)
    return backend
