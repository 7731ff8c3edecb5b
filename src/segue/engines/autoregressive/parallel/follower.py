"""Follower ranks of a stage model: they execute the leader's orders (`segue.engines.autoregressive.parallel.ranks`),
each with its part of the weights, its share of the KV heads and the states of its own layers."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from segue.engines.autoregressive.contract import (
    AutoregressiveModel,
    Draws,
    FlatBatch,
    LoraHost,
    Prompt,
    TakesLora,
    YieldsRows,
)
from segue.kernels.attention.invariant_attention import InvariantStep, invariant_step
from segue.kernels.attention.paged_attention import library_attention
from segue.kernels.attention.paged_step import AttentionBackend, HybridStep, PagedStep, paged_step
from segue.kernels.kv.states import StateStep, StateStore, state_step
from segue.kernels.kv.store import KVStore
from segue.kernels.linear.lora import Lora
from segue.parallel.group import Group
from segue.parallel.orders import (
    Advance,
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
def follow(model: AutoregressiveModel, group: Group, orders: socket.socket, backend: AttentionBackend | None) -> None:
    """Execute the leader's orders until it closes its end. `backend`: reads the stores that use a backend."""
    follower = _Follower(model, group, backend)
    while (order := receive(orders)) is not None:
        follower.obey(order)


@dataclass(slots=True)
class _Follower:
    model: AutoregressiveModel
    group: Group
    backend: AttentionBackend | None
    stores: dict[int, KVStore] = field(default_factory=dict)
    state_stores: dict[int, StateStore] = field(default_factory=dict)
    embedded: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    loras: dict[bytes, Lora] = field(default_factory=dict)
    """By identity: adapters that can be named, and those that only running sequences of the leader still use."""

    def __post_init__(self) -> None:
        if isinstance(self.model, TakesLora) and self.model.lora is not None:
            self.loras = {lora.identity: lora for lora in self.model.lora.loaded.values()}

    def obey(self, order: Order) -> None:
        match order:
            case OpenStore():
                self.stores[order.store] = KVStore(
                    order.layout,
                    num_blocks=order.num_blocks,
                    block_size=order.block_size,
                    dtype=dtype_of(order.dtype),
                    stored=None if order.stored is None else dtype_of(order.stored),
                    device=self.model.device,
                    backend=None if order.gathers else self.backend,
                )
            case CloseStore():
                del self.stores[order.store]
            case CopyBlocks():
                self.stores[order.store].copy(order.pairs)
            case ScrubBlocks():
                self.stores[order.store].scrub(order.blocks)
            case OpenStates():
                layout = self.model.kv.states
                assert layout is not None, "the leader has states, but this rank's layers have none"
                self.state_stores[order.store] = StateStore(layout, order.slots, self.model.device)
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
                ids = self.received((order.count, order.groups) if order.groups else (order.count,), torch.long)
                self.embedded = self.model.embed(ids, None)
            case Forward():
                self.forward(order)
            case Logits():
                hidden = self.hidden
                if order.hidden is not None:
                    width, dtype = order.hidden
                    hidden = self.received((order.rows, width), dtype_of(dtype))
                assert hidden is not None
                self.model.logits(hidden)
            case Advance():
                self.advance(order)

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
        others = {name: self.received(shape, dtype_of(dtype)) for name, shape, dtype in order.others}
        batch = FlatBatch(numbers[0], None, numbers[1:], self.step(order), list(prompts), self.states(order), others)
        with library_attention() if order.store is None else nullcontext():
            self.hidden, _ = self.model.forward(embeds, batch)

    def advance(self, order: Advance) -> None:
        assert isinstance(self.model, YieldsRows), "the leader yields rows of codes, but this rank does not"
        width, dtype = order.hidden
        hidden = self.received((order.rows, width), dtype_of(dtype))
        ids, greedy = self.received((2, order.rows), torch.long)
        numbers = self.received((order.rows, self.model.groups - 1), torch.float64)
        filters = self.received((order.rows, 3), torch.float64)
        self.model.advance(hidden, ids, Draws(numbers, greedy.bool(), filters))

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
        assert isinstance(self.model, TakesLora), "the leader has adapters, but this rank supports none"
        assert self.model.lora is not None
        return self.model.lora

    def received(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.group.broadcast(torch.empty(shape, dtype=dtype, device=self.model.device))
