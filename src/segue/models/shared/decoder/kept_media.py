"""Keep keys and values of media for a decoder's cross-attention layers: of images, or of encoder states of audio.

The decoder's own layers compute them once per medium, in the first step that has a token of it; requests with the same
medium share them. They are kept within a byte limit, least recently used evicted first, except those that the previous
step used. If a step's media exceed the limit, as many as fit are kept, and the others are recomputed in each step from
the rows in their prompts. Running out of memory here costs time but never changes a result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from segue.kernels.attention.cross_attention import KeysValues


@dataclass(slots=True)
class _Kept:
    layers: dict[int, KeysValues] = field(default_factory=dict)
    nbytes: int = 0


class KeptMedia:
    """Keys and values of media by hash, within `capacity` bytes."""

    def __init__(self, layers: frozenset[int], row_bytes: int, capacity: int) -> None:
        """`layers`: the cross-attention layers. `row_bytes`: bytes of one row's keys and values over all of them."""
        self.layers = layers
        self.capacity = capacity
        self.bytes = 0
        self.made = 0
        """Number of media whose keys and values were computed."""
        self._row_bytes = row_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._before: frozenset[bytes] = frozenset()

    def begin(self, wanted: Mapping[bytes, int]) -> list[bytes]:
        """Begin a step that uses these media (hash → rows). Returns the media that must be computed."""
        for key in [key for key, kept in self._kept.items() if len(kept.layers) < len(self.layers)]:
            self._drop(key)  # incomplete, because its step failed
        missing = []
        for key in wanted:
            if key in self._kept:
                self._kept.move_to_end(key)
            else:
                missing.append(key)
        for key in missing:
            self._make_room(key, wanted[key] * self._row_bytes, wanted)
        self.made += len(missing)
        self._before = frozenset(wanted)
        return missing

    def put(self, layer: int, key: bytes, made: KeysValues) -> bool:
        """Keep one medium's keys and values of one layer if memory was reserved for it. Returns whether it did."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        keys, values = made
        kept.layers[layer] = keys.clone(), values.clone()
        return True

    def put_all(
        self, layer: int, missing: Sequence[tuple[bytes, int]], keys: torch.Tensor, values: torch.Tensor
    ) -> dict[bytes, KeysValues]:
        """Keep a layer's keys and values [kv_heads, rows of all, dim] of the media that `begin` returned: (hash, rows)
        in order. Returns those that do not fit."""
        sizes = [rows for _, rows in missing]
        both = zip(keys.split(sizes, 1), values.split(sizes, 1), strict=True)
        made = dict(zip((key for key, _ in missing), both, strict=True))
        return {key: own for key, own in made.items() if not self.put(layer, key, own)}

    def get(self, layer: int, key: bytes) -> KeysValues:
        """One layer's keys and values of a kept medium."""
        return self._kept[key].layers[layer]

    def _make_room(self, key: bytes, nbytes: int, wanted: Mapping[bytes, int]) -> None:
        idle = [old for old in self._kept if old not in wanted and old not in self._before]
        left = self.bytes - sum(self._kept[old].nbytes for old in idle)
        if left + nbytes > self.capacity:
            return
        for old in idle:
            if self.bytes + nbytes <= self.capacity:
                break
            self._drop(old)
        self._kept[key] = _Kept(nbytes=nbytes)
        self.bytes += nbytes

    def _drop(self, key: bytes) -> None:
        self.bytes -= self._kept.pop(key).nbytes
