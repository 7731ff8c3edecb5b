"""Keys and values of media, for the layers of a decoder that look at them: pictures, or what is heard.

They are made once per medium, by the decoder's own layers, in the step that first has a token of it; who sends the
same medium shares them. They lie in a bound of bytes, least recently used out first, but for those that the step
before looked at: of more media than there is room for, as many as fit stay, and the others' are made anew in each
step out of the rows that their prompts hold. So running out of room costs time, and never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from segue.kernels.cross_attention import KeysValues


@dataclass(slots=True)
class _Kept:
    layers: dict[int, KeysValues] = field(default_factory=dict)
    nbytes: int = 0


class KeptMedia:
    """By hash, within `capacity` bytes."""

    def __init__(self, layers: frozenset[int], row_bytes: int, capacity: int) -> None:
        """`layers`: those that look at media. `row_bytes`: of one row's keys and values in all of them."""
        self.layers = layers
        self.capacity = capacity
        self.bytes = 0
        self.made = 0
        """Media whose keys and values were computed."""
        self._row_bytes = row_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._before: frozenset[bytes] = frozenset()

    def begin(self, wanted: Mapping[bytes, int]) -> list[bytes]:
        """A step begins that looks at these media, of so many rows: those that must be made."""
        for key in [key for key, kept in self._kept.items() if len(kept.layers) < len(self.layers)]:
            self._drop(key)  # of a step that failed on the way
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
        """Keep it where there is room for this one."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        keys, values = made
        kept.layers[layer] = keys.clone(), values.clone()
        return True

    def put_all(
        self, layer: int, missing: Sequence[tuple[bytes, int]], keys: torch.Tensor, values: torch.Tensor
    ) -> dict[bytes, KeysValues]:
        """Keep what a layer made of the media that `begin` named: (which, its rows) in their order, [kv_heads, rows of
        all of them, dim]. Those that there is no room to keep."""
        sizes = [rows for _, rows in missing]
        both = zip(keys.split(sizes, 1), values.split(sizes, 1), strict=True)
        made = dict(zip((key for key, _ in missing), both, strict=True))
        return {key: own for key, own in made.items() if not self.put(layer, key, own)}

    def get(self, layer: int, key: bytes) -> KeysValues:
        """Of one that is kept."""
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
