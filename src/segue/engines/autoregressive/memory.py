"""How many KV blocks fit a byte budget."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from segue.engines.autoregressive.contract import KVSpec
from segue.engines.autoregressive.slots import StateSlots
from segue.kernels.kv_layout import KVLayout
from segue.messages.errors import ConfigError


def bytes_per_block(spec: KVSpec, layout: KVLayout, block_size: int) -> int:
    """Bytes of one block: K and V of the layers of one group, and the captured rows that live beside them."""
    return block_size * (layout.token_width * spec.stored_size + spec.capture_width * spec.capture_dtype.itemsize)


def blocks_for(
    budget: int, spec: KVSpec, layout: KVLayout, block_size: int, beside: int = 0, *, most: int = sys.maxsize
) -> int:
    """Blocks that fit `budget` bytes, up to `most`, where `block_size` tokens take `beside` bytes elsewhere (a
    drafter's cache).

    Raises `ConfigError` where not one for each group does.
    """
    least = layout.groups * bytes_per_block(spec, layout, block_size) + beside
    if not least:
        return most
    if budget < least:
        raise ConfigError(
            f"kv_cache_bytes is {budget}, but {block_size} tokens take {least} bytes; give at least that",
            field="kv_cache_bytes",
        )
    return min(most, budget * layout.groups // least)


def state_bytes(spec: KVSpec, max_batch: int, snapshots: int = 0) -> int:
    """Bytes of the states of so many running sequences, and of so many prefixes."""
    return 0 if spec.states is None else (StateSlots(max_batch).total + snapshots) * spec.states.slot_bytes


def prefix_states(spec: KVSpec, max_batch: int, wanted: int | None, budget: int | None, *, caching: bool) -> int:
    """States of prefixes that are kept: none where a sequence's does not go on from several tokens. Where it is not
    said how many are `wanted`, they take at most a quarter of what those of running sequences leave of `budget`
    bytes."""
    if spec.states is None or not spec.states.continues or not caching:
        return 0
    if wanted is not None:
        return wanted
    left = sys.maxsize if budget is None else max(0, budget - state_bytes(spec, max_batch))
    return min(max_batch, left // 4 // spec.states.slot_bytes)


def drafting_states(max_batch: int, drafts: bool) -> int:
    """States that sequences go on from where a draft is rejected."""
    return max_batch if drafts else 0


def stored_as(spec: KVSpec, kv_dtype: str) -> KVSpec:
    """The cache as a deployment wants it kept: `auto` or `fp8`."""
    return replace(spec, stored=torch.float8_e4m3fn) if kv_dtype == "fp8" else spec
