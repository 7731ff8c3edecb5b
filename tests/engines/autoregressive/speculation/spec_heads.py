"""Heads trained on the spot until they draft well on a few texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ar_adapter import TinyAdapter
from torch.nn.functional import cross_entropy

from segue.engines.autoregressive.contract import FlatBatch
from segue.engines.autoregressive.speculation.cache import keeping
from segue.engines.autoregressive.speculation.contract import ChainHead, ParallelHeads
from segue.kernels.attention.paged_step import PagedStep, Part, paged_step
from segue.kernels.kv.store import KVStore

STEPS = 120


def store(spec: Any, blocks: int, size: int) -> KVStore:
    return KVStore(keeping(spec), num_blocks=blocks, block_size=size, dtype=spec.dtype, device=torch.device("cpu"))


def whole(spec: Any, *lengths: int) -> PagedStep:
    """A step that computes sequences of these lengths, which grow, from their first to their last tokens."""
    size = max(lengths)
    parts = [Part((number,), 0, length) for number, length in enumerate(lengths)]
    return paged_step(store(spec, len(lengths), size), parts)


def hidden_states(adapter: TinyAdapter, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, hidden] of the target."""
    tokens = torch.tensor(ids)
    places = torch.arange(len(ids))[None]
    batch = FlatBatch(tokens, None, places, whole(adapter.kv, len(ids)), [(None, 0, len(ids))])
    with torch.no_grad():
        return adapter.forward(adapter.embed(tokens, None), batch)[0]


def train_chain(
    head: ChainHead, network: torch.nn.Module, adapter: TinyAdapter, texts: Sequence[Sequence[int]]
) -> None:
    """Adam on the texts, two drafts deep: from the target's hidden states, and from the head's own."""
    network.requires_grad_(True)
    adapter.model.requires_grad_(False)
    optimiser = torch.optim.Adam(network.parameters(), lr=4e-3)
    texts = sorted(texts, key=len)
    counts = [len(ids) - 3 for ids in texts]
    first, second, third = (_shifted(texts, by) for by in (1, 2, 3))
    places = torch.cat([torch.arange(count) for count in counts])
    for _ in range(STEPS):
        rows = torch.cat([_rows(head, adapter, ids)[:count] for ids, count in zip(texts, counts, strict=True)])
        own, out = head.forward(rows, first, places, whole(head.kv, *counts))
        loss = cross_entropy(_finite(head.logits(out)), second)
        _, out = head.forward(own, second, places + 1, whole(head.kv, *counts))
        loss = loss + cross_entropy(_finite(head.logits(out)), third)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    network.requires_grad_(False)


def _shifted(texts: Sequence[Sequence[int]], by: int) -> torch.Tensor:
    """Of each text the tokens `by` places on, as many as have three after them."""
    return torch.tensor([token for ids in texts for token in ids[by : len(ids) - 3 + by]])


def _rows(head: ChainHead, adapter: TinyAdapter, ids: Sequence[int]) -> torch.Tensor:
    """What the head starts from: run anew each time, for a head that has weights in it."""
    return head.rows(hidden_states(adapter, ids))


def _finite(logits: torch.Tensor) -> torch.Tensor:
    return logits.clamp(min=-1e4)


def train_parallel(
    heads: ParallelHeads, weights: dict[str, torch.Tensor], adapter: TinyAdapter, texts: Sequence[Sequence[int]]
) -> None:
    for weight in weights.values():
        weight.requires_grad_(True)
    optimiser = torch.optim.Adam(weights.values(), lr=1e-2)
    taught = [hidden_states(adapter, ids) for ids in texts]
    for _ in range(STEPS):
        loss = torch.zeros(())
        for ids, states in zip(texts, taught, strict=True):
            tokens, count = torch.tensor(ids), len(ids) - 1 - heads.count
            logits = heads.logits(states[:count])
            for head in range(heads.count):
                loss = loss + cross_entropy(_finite(logits[:, head]), tokens[2 + head : 2 + head + count])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for weight in weights.values():
        weight.requires_grad_(False)


def renamed(network: torch.nn.Module, name: Callable[[str], str]) -> dict[str, torch.Tensor]:
    return {name(key): tensor.detach().clone() for key, tensor in network.state_dict().items()}
