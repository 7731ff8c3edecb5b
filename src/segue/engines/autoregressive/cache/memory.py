"""Computes how many KV blocks and states fit a byte budget."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from segue.engines.autoregressive.cache.states import StateSlots
from segue.engines.autoregressive.contract import KVSpec
from segue.kernels.kv.layout import KVLayout
from segue.messages.errors import ConfigError


def bytes_per_block(spec: KVSpec, layout: KVLayout, block_size: int) -> int:
    """Bytes of one block: K and V of the layers of one group, and the captured rows stored with them."""
    return block_size * (layout.token_width * spec.stored_size + spec.capture_width * spec.capture_dtype.itemsize)


def blocks_for(
    budget: int, spec: KVSpec, layout: KVLayout, block_size: int, elsewhere: int = 0, *, most: int = sys.maxsize
) -> int:
    """Blocks that fit `budget` bytes, up to `most`, if `block_size` tokens take `elsewhere` bytes outside of it (a
    drafter's cache).

    Raises `ConfigError` if the budget does not hold one block per group.
    """
    least = layout.groups * bytes_per_block(spec, layout, block_size) + elsewhere
    if not least:
        return most
    if budget < least:
        raise ConfigError(
            f"kv_cache_bytes is {budget}, but {block_size} tokens take {least} bytes; give at least that",
            field="kv_cache_bytes",
        )
    return min(most, budget * layout.groups // least)


def state_bytes(spec: KVSpec, max_batch: int, snapshots: int = 0) -> int:
    """Bytes of the states of `max_batch` running sequences and `snapshots` prefixes."""
    return 0 if spec.states is None else (StateSlots(max_batch).total + snapshots) * spec.states.slot_bytes


def prefix_states(spec: KVSpec, max_batch: int, wanted: int | None, budget: int | None, *, caching: bool) -> int:
    """Number of prefix states to keep: none if states cannot continue with several tokens. If `wanted` is None, they
    take at most a quarter of the part of `budget` bytes that remains after the states of running sequences."""
    if spec.states is None or not spec.states.continues or not caching:
        return 0
    if wanted is not None:
        return wanted
    left = sys.maxsize if budget is None else max(0, budget - state_bytes(spec, max_batch))
    return min(max_batch, left // 4 // spec.states.slot_bytes)


def drafting_states(max_batch: int, drafts: bool) -> int:
    """Number of states to keep for continuing after a rejected draft."""
    return max_batch if drafts else 0


def stored_as(spec: KVSpec, kv_dtype: str) -> KVSpec:
    """The spec with the storage dtype of the deployment: `auto` or `fp8`."""
    return replace(spec, stored=torch.float8_e4m3fn) if kv_dtype == "fp8" else spec
