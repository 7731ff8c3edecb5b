"""How many KV blocks fit a byte budget."""

from __future__ import annotations

from segue.engines.autoregressive.contract import KVSpec
from segue.kernels.kv_layout import KVLayout
from segue.messages.errors import ConfigError


def bytes_per_block(spec: KVSpec, layout: KVLayout, block_size: int) -> int:
    """Bytes of one block: K and V of the layers of one group, and the captured rows that live beside them."""
    return block_size * (layout.token_width * spec.dtype.itemsize + spec.capture_width * spec.capture_dtype.itemsize)


def blocks_for(budget: int, spec: KVSpec, layout: KVLayout, block_size: int) -> int:
    """Blocks that fit `budget` bytes. Raises `ConfigError` where not one for each group does."""
    each = bytes_per_block(spec, layout, block_size)
    least = layout.groups * each
    if budget < least:
        raise ConfigError(
            f"kv_cache_bytes is {budget}, but {block_size} tokens take {least} bytes; give at least that",
            field="kv_cache_bytes",
        )
    return budget // each
