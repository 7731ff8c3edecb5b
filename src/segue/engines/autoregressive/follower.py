"""The other ranks of an adapter: they do what the leader tells (`segue.engines.autoregressive.ranks`), each with its
part of the weights, its share of the KV heads and the states of its own layers."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter, FlatBatch, LoraHost, Prompt, TakesLora
from segue.kernels.invariant_attention import InvariantStep, invariant_step
from segue.kernels.kv_store import KVStore
from segue.kernels.lora import Lora
from segue.kernels.paged_attention import library_attention
from segue.kernels.paged_step import AttentionBackend, HybridStep, PagedStep, paged_step
from segue.kernels.state_store import StateStep, StateStore, state_step
from segue.parallel.group import Group
from segue.parallel.orders import (
    CloseStates,
    CloseStore,
    CopyBlocks,
    CopyStates,
    Embed,
    ForgetAdapter,
    Forward,
    LoadAdapter,
    Logits,
    OpenStates,
    OpenStore,
    Order,
    ScrubBlocks,
    UnloadAdapter,
    dtype_of,
    receive,
)


@torch.inference_mode()
def follow(
    adapter: AutoregressiveAdapter, group: Group, orders: socket.socket, backend: AttentionBackend | None
) -> None:
    """Do what the leader does, until it closes its end. `backend`: what stores are read with that have one."""
    follower = _Follower(adapter, group, backend)
    while (order := receive(orders)) is not None:
        follower.obey(order)


@dataclass(slots=True)
class _Follower:
    adapter: AutoregressiveAdapter
    group: Group
    backend: AttentionBackend | None
    stores: dict[int, KVStore] = field(default_factory=dict)
    state_stores: dict[int, StateStore] = field(default_factory=dict)
    embedded: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    loras: dict[bytes, Lora] = field(default_factory=dict)
    """By identity: those that can be named, and those that only sequences of the leader have."""

    def __post_init__(self) -> None:
        if isinstance(self.adapter, TakesLora) and self.adapter.lora is not None:
            self.loras = {lora.identity: lora for lora in self.adapter.lora.loaded.values()}

    def obey(self, order: Order) -> None:
        match order:
            case OpenStore():
                self.stores[order.store] = KVStore(
                    order.layout,
                    num_blocks=order.num_blocks,
                    block_size=order.block_size,
                    dtype=dtype_of(order.dtype),
                    stored=None if order.stored is None else dtype_of(order.stored),
                    device=self.adapter.device,
                    backend=None if order.gathers else self.backend,
                )
            case CloseStore():
                del self.stores[order.store]
            case CopyBlocks():
                self.stores[order.store].copy(order.pairs)
            case ScrubBlocks():
                self.stores[order.store].scrub(order.blocks)
            case OpenStates():
                layout = self.adapter.kv.states
                assert layout is not None, "the leader keeps states, and this rank's layers keep none"
                self.state_stores[order.store] = StateStore(layout, order.slots, self.adapter.device)
            case CloseStates():
                del self.state_stores[order.store]
            case CopyStates():
                self.state_stores[order.store].copy(order.pairs)
            case LoadAdapter():
                self.host.load(order.name, order.directory)
                lora = self.host.loaded[order.name]
                self.loras[lora.identity] = lora
            case UnloadAdapter():
                self.host.unload(order.name)
            case ForgetAdapter():
                del self.loras[order.identity]
            case Embed():
                ids = self.received((order.count,), torch.long)
                self.embedded = self.adapter.embed(ids, None)
            case Forward():
                self.forward(order)
            case Logits():
                hidden = self.hidden
                if order.hidden is not None:
                    width, dtype = order.hidden
                    hidden = self.received((order.rows, width), dtype_of(dtype))
                assert hidden is not None
                self.adapter.logits(hidden)

    def forward(self, order: Forward) -> None:
        numbers = self.received((1 + order.axes, order.tokens), torch.long)
        embeds = self.embedded
        if order.embeds is not None:
            width, dtype = order.embeds
            embeds = self.received((order.tokens, width), dtype_of(dtype))
        assert embeds is not None
        prompts = [
            (None if identity is None else Prompt(token_ids=[], adapter=self.loras[identity]), start, stop)
            for identity, (start, stop) in zip(order.adapters, order.spans, strict=True)
        ]
        batch = FlatBatch(numbers[0], None, numbers[1:], self.step(order), list(prompts), self.states(order))
        with library_attention() if order.store is None else nullcontext():
            self.hidden, _ = self.adapter.forward(embeds, batch)

    def step(self, order: Forward) -> PagedStep | HybridStep | InvariantStep | None:
        if order.store is None:
            return None
        store = self.stores[order.store]
        if order.invariant:
            return invariant_step(store, order.groups[0].parts())
        groups = [paged_step(store, group.parts()) for group in order.groups]
        return groups[0] if len(groups) == 1 else HybridStep(groups, store.layout.group_of)

    def states(self, order: Forward) -> StateStep | None:
        if order.states is None:
            return None
        store, stretches = order.states
        return state_step(self.state_stores[store], stretches)

    @property
    def host(self) -> LoraHost:
        assert isinstance(self.adapter, TakesLora), "the leader has adapters, and this rank takes none"
        assert self.adapter.lora is not None
        return self.adapter.lora

    def received(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.group.broadcast(torch.empty(shape, dtype=dtype, device=self.adapter.device))
