"""What encoders made of media that they have seen before."""

from __future__ import annotations

from collections import OrderedDict

import torch

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError

DEFAULT_CACHE_BYTES = 256 * 2**20


def cache_bytes(ctx: LoadContext) -> int:
    """The stage's option `cache_bytes`. Raises `ConfigError`."""
    capacity = ctx.options.get("cache_bytes", DEFAULT_CACHE_BYTES)
    if not isinstance(capacity, int) or capacity < 0:
        raise ConfigError(f"cache_bytes is {capacity!r}; it must be a number of bytes, 0 for no cache")
    return capacity


class EncoderCache:
    """Embeddings by content hash, least recently used out first, within a bound of bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self.hits = 0
        self._rows: OrderedDict[tuple[str, bytes], torch.Tensor] = OrderedDict()

    def __contains__(self, key: tuple[str, bytes]) -> bool:
        return key in self._rows

    def get(self, key: tuple[str, bytes]) -> torch.Tensor | None:
        rows = self._rows.get(key)
        if rows is not None:
            self._rows.move_to_end(key)
            self.hits += 1
        return rows

    def put(self, key: tuple[str, bytes], rows: torch.Tensor) -> None:
        """Keep rows of their own memory; what is larger than the whole cache is not kept."""
        if key in self._rows or rows.nbytes > self.capacity:
            return
        self._rows[key] = rows
        self.bytes += rows.nbytes
        while self.bytes > self.capacity:
            _, oldest = self._rows.popitem(last=False)
            self.bytes -= oldest.nbytes
