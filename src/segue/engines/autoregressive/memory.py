"""How many KV blocks fit a byte budget."""

from __future__ import annotations

from segue.engines.autoregressive.contract import KVSpec
from segue.messages.errors import ConfigError


def bytes_per_block(spec: KVSpec, block_size: int) -> int:
    """Bytes of one block over all layers: K, V, and the captured rows that live beside them."""
    kv = 2 * spec.layers * spec.kv_heads * spec.head_dim * spec.dtype.itemsize
    return block_size * (kv + spec.capture_width * spec.capture_dtype.itemsize)


def blocks_for(budget: int, spec: KVSpec, block_size: int) -> int:
    """Blocks that fit `budget` bytes. Raises `ConfigError` where not a single one does."""
    each = bytes_per_block(spec, block_size)
    if budget < each:
        raise ConfigError(
            f"kv_cache_bytes is {budget}, but one block of {block_size} tokens takes {each} bytes; give at least that",
            field="kv_cache_bytes",
        )
    return budget // each
