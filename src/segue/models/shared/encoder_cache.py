"""A cache of encoder results, so that media are encoded once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError

DEFAULT_CACHE_BYTES = 256 * 2**20

T = TypeVar("T")


def cache_bytes(ctx: LoadContext) -> int:
    """The stage's option `cache_bytes`. Raises `ConfigError`."""
    capacity = ctx.options.get("cache_bytes", DEFAULT_CACHE_BYTES)
    if not isinstance(capacity, int) or capacity < 0:
        raise ConfigError(f"cache_bytes is {capacity!r}; it must be a number of bytes, 0 for no cache")
    return capacity


class EncoderCache:
    """Embeddings by content hash, within a byte limit; the least recently used are evicted first."""

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
        """Keep rows that own their memory; rows larger than the whole cache are not kept."""
        if key in self._rows or rows.nbytes > self.capacity:
            return
        self._rows[key] = rows
        self.bytes += rows.nbytes
        while self.bytes > self.capacity:
            _, oldest = self._rows.popitem(last=False)
            self.bytes -= oldest.nbytes

    def through(
        self, items: Mapping[tuple[str, bytes], T], encode: Callable[[list[T]], Sequence[torch.Tensor]]
    ) -> dict[tuple[str, bytes], torch.Tensor]:
        """The rows of each item; items that are not cached are encoded in one call."""
        rows = {key: known for key in items if (known := self.get(key)) is not None}
        missing = [key for key in items if key not in rows]
        if missing:
            for key, encoded in zip(missing, encode([items[key] for key in missing]), strict=True):
                rows[key] = encoded
                self.put(key, encoded)
        return rows


def add_content(digest: Any, value: Any) -> None:
    """Feed a value to a hash of `hashlib`: tensors by type, shape and content, lists and mappings element by element,
    anything else by its text form."""
    if isinstance(value, torch.Tensor):
        digest.update(repr((str(value.dtype), tuple(value.shape))).encode())
        raw = value.cpu().contiguous()
        digest.update(raw.view(torch.uint8).numpy().data if raw.ndim else repr(raw.item()).encode())
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            add_content(digest, item)
    elif isinstance(value, dict):
        digest.update(f"{{{len(value)}}}".encode())
        for key in sorted(value):
            add_content(digest, key)
            add_content(digest, value[key])
    else:
        digest.update(repr(value).encode())
