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


def state_bytes(spec: KVSpec, max_batch: int) -> int:
    """Bytes of the states of so many running sequences."""
    return 0 if spec.states is None else StateSlots(max_batch).total * spec.states.slot_bytes


def stored_as(spec: KVSpec, kv_dtype: str) -> KVSpec:
    """The cache as a deployment wants it kept: `auto` or `fp8`."""
    return replace(spec, stored=torch.float8_e4m3fn) if kv_dtype == "fp8" else spec
