"""One stage model on several ranks: the engine runs on the leader, and `Leader` looks like any other stage model.

Every call that the leader's engine makes on the model or a store is sent to the followers as an order, in the same
sequence (`segue.parallel.orders`). Each rank has its own part of the weights and its own share of the KV heads, under
the leader's block tables, and the states of its own layers, in the leader's slots. Tokens, text and scheduling exist
on the leader alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from segue.engines.autoregressive.contract import (
    AutoregressiveModel,
    Draws,
    FlatBatch,
    LoraHost,
    Prompt,
    ReadsOthers,
    TakesLora,
    YieldsRows,
)
from segue.engines.autoregressive.wrapped import Wrapped
from segue.kernels.attention.invariant_attention import InvariantStep
from segue.kernels.attention.paged_step import AttentionBackend, HybridStep, PagedStep
from segue.kernels.kv.layout import KVLayout
from segue.kernels.kv.states import StateLayout, StateStore
from segue.kernels.kv.store import KVStore
from segue.kernels.linear.lora import Lora
from segue.parallel.group import Group, ReplicaBroken
from segue.parallel.orders import (
    Advance,
    CloseStates,
    CloseStore,
    CopyBlocks,
    CopyStates,
    Crew,
    Embed,
    ForgetAdapter,
    Forward,
    LoadAdapter,
    Logits,
    OpenStates,
    OpenStore,
    Order,
    ScrubBlocks,
    Sequences,
    UnloadAdapter,
    dtype_name,
)


class LedStore(KVStore):
    """The leader's KV store: followers apply the same operations to their blocks."""

    def __init__(
        self,
        tell: Callable[[Order], None],
        number: int,
        layout: KVLayout,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
        backend: AttentionBackend | None = None,
        **others: Any,
    ) -> None:
        """Like a `KVStore` of this rank's heads; `others`: options that followers do not need."""
        super().__init__(
            layout,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            stored=stored,
            backend=backend,
            **others,
        )
        self.number = number
        self._tell = tell
        kept = None if stored is None else dtype_name(stored)
        tell(OpenStore(number, layout, num_blocks, block_size, dtype_name(dtype), kept, backend is None))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._tell(CopyBlocks(self.number, list(pairs)))
        super().copy(pairs)

    def scrub(self, blocks: list[int]) -> None:
        if blocks:
            self._tell(ScrubBlocks(self.number, blocks))
        super().scrub(blocks)


class LedStates(StateStore):
    """The leader's state store: followers apply the same operations to their slots."""

    def __init__(
        self, tell: Callable[[Order], None], number: int, layout: StateLayout, slots: int, device: torch.device
    ) -> None:
        super().__init__(layout, slots, device)
        self.number = number
        self._tell = tell
        tell(OpenStates(number, slots))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._tell(CopyStates(self.number, list(pairs)))
        super().copy(pairs)


class LedAdapters:
    """The leader's LoRA adapters: followers load and unload the same ones. Implements `LoraHost`."""

    def __init__(self, inner: LoraHost, tell: Callable[[Order], None]) -> None:
        self._inner = inner
        self._tell = tell
        self._gone: list[bytes] = []
        for lora in inner.loaded.values():
            self._watch(lora)

    @property
    def loaded(self) -> Mapping[str, Lora]:
        return self._inner.loaded

    def load(self, name: str, directory: str) -> None:
        """Load it on the leader, which refuses invalid adapters before any follower receives the order."""
        self._inner.load(name, directory)
        self._watch(self._inner.loaded[name])
        self._tell(LoadAdapter(name, directory))

    def unload(self, name: str) -> None:
        self._inner.unload(name)
        self._tell(UnloadAdapter(name))

    def forgotten(self) -> Iterator[ForgetAdapter]:
        """Orders to drop adapters that followers need not keep any longer."""
        while self._gone:
            yield ForgetAdapter(self._gone.pop())

    def _watch(self, lora: Lora) -> None:
        weakref.finalize(lora, self._gone.append, lora.identity).atexit = False


class Leader(Wrapped):
    """An `AutoregressiveModel` that sends the calls of the leader's own model to the followers, too."""

    def __init__(self, inner: AutoregressiveModel, group: Group, crew: Crew) -> None:
        super().__init__(inner)
        self._group = group
        self._crew = crew
        self._stores = 0
        self._closed: list[CloseStore | CloseStates] = []
        """Stores freed since the last order. Sent with the next one, because a store may be freed at any moment."""
        self._embedded: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self._serving = False
        self.kv = replace(inner.kv, store=self._open, state_store=self._open_states)
        host = inner.lora if isinstance(inner, TakesLora) else None
        self.lora = None if host is None else LedAdapters(host, self._tell)

    def serve(self) -> None:
        """End of loading: from now on an error in the model or between the ranks is `ReplicaBroken`."""
        self._serving = True

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] ids or [n, groups] rows of codes, [n, width] rows (conditioned stages) → [n, hidden]. A conditioned stage
        model has its embedding whole: the leader alone runs it, and `forward` sends the result."""
        if conditioning is not None:
            return self.inner.embed(token_ids, conditioning)
        with self._together():
            self._tell(Embed(*token_ids.shape))
            self._group.broadcast(token_ids.contiguous())
            self._embedded = self.inner.embed(token_ids, None)
        return self._embedded

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, hidden] → (final hidden states, captured rows or None)."""
        with self._together():
            known = embeds is self._embedded
            order = _forward_order(embeds, batch, known=known)
            others = self.inner.others(batch) if isinstance(self.inner, ReadsOthers) else {}
            order.others = [(name, tuple(one.shape), dtype_name(one.dtype)) for name, one in others.items()]
            self._tell(order)
            self._group.broadcast(torch.cat([batch.token_ids[None], batch.positions]))
            if not known:
                self._group.broadcast(embeds.contiguous())
            for one in others.values():
                self._group.broadcast(one.to(embeds.device).contiguous())
            self._hidden, captured = self.inner.forward(embeds, batch)
        return self._hidden, captured

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        with self._together():
            known = hidden is self._hidden
            shape = None if known else (hidden.shape[1], dtype_name(hidden.dtype))
            self._tell(Logits(len(hidden), shape))
            if not known:
                self._group.broadcast(hidden.contiguous())
            return self.inner.logits(hidden)

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, hidden], [n] codes 0 → [n, groups - 1], for an inner stage model that yields rows of codes."""
        assert isinstance(self.inner, YieldsRows)
        with self._together():
            self._tell(Advance(len(ids), (hidden.shape[1], dtype_name(hidden.dtype))))
            self._group.broadcast(hidden.contiguous())
            self._group.broadcast(torch.stack([ids, draws.greedy.long()]))
            self._group.broadcast(draws.numbers.contiguous())
            self._group.broadcast(draws.filters.contiguous())
            return self.inner.advance(hidden, ids, draws)

    def _open(self, layout: KVLayout, **options: Any) -> KVStore:
        """Constructor of KV stores for the KV spec."""
        store = LedStore(self._tell, self._next_number(), layout, **options)
        weakref.finalize(store, self._closed.append, CloseStore(store.number)).atexit = False
        return store

    def _open_states(self, layout: StateLayout, slots: int, device: torch.device) -> StateStore:
        """Constructor of state stores for the KV spec."""
        store = LedStates(self._tell, self._next_number(), layout, slots, device)
        weakref.finalize(store, self._closed.append, CloseStates(store.number)).atexit = False
        return store

    def _next_number(self) -> int:
        """Number of a new store, of either kind."""
        self._stores += 1
        return self._stores

    def _tell(self, order: Order) -> None:
        while self._closed:
            self._crew.tell(self._closed.pop())
        if self.lora is not None:
            for gone in self.lora.forgotten():
                self._crew.tell(gone)
        self._crew.tell(order)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        # after any error, this rank is at another point in the model than the others
        except Exception as error:
            if not self._serving:
                raise
            raise ReplicaBroken(f"the ranks of a replica are out of step: {type(error).__name__}: {error}") from error


def _forward_order(embeds: torch.Tensor, batch: FlatBatch, *, known: bool) -> Forward:
    step = batch.attention
    order = Forward(
        tokens=len(embeds),
        axes=len(batch.positions),
        embeds=None if known else (embeds.shape[1], dtype_name(embeds.dtype)),
        spans=[(start, stop) for _, start, stop in batch.prompts],
        adapters=[_identity(prompt) for prompt, _, _ in batch.prompts],
        store=None,
        groups=[],
        states=None if batch.states is None else (_number(batch.states.store), list(batch.states.stretches)),
    )
    match step:
        case HybridStep():
            steps = step.groups
        case PagedStep():
            steps = [step]
        case InvariantStep():
            order.store, order.invariant = _number(step.store), True
            order.groups = [Sequences.of(step.parts, step.store.block_size)]
            return order
        case _:
            return order
    order.store = _number(steps[0].store)
    order.groups = [Sequences.of(one.parts, one.store.block_size) for one in steps]
    return order


def _identity(prompt: Prompt | None) -> bytes | None:
    adapter = None if prompt is None else prompt.adapter
    return adapter.identity if isinstance(adapter, Lora) else None


def _number(store: KVStore | StateStore) -> int:
    assert isinstance(store, LedStore | LedStates), "followers have no such store"
    return store.number
