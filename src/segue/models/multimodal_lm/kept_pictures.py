"""Keys and values of pictures, for the layers that look at them.

They are made once per picture, by the decoder's own layers, in the step that first has a token of it; who sends the
same picture shares them. They lie in a bound of bytes, least recently used out first, but for those that the step
before looked at: of more pictures than there is room for, as many as fit stay, and the others' are made anew in each
step out of the rows that their prompts hold. So running out of room costs time, and never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import Prompt
from segue.kernels.cross_attention import CrossStep, KeysValues, Look, Seen
from segue.kernels.staging import upload
from segue.models.multimodal_lm.shown import Shown
from segue.models.no_cache import NoCache


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """A layer of the library's cache: one that has something."""

    keys: torch.Tensor
    """What is not empty; attention asks the step, and does not read it."""
    values: torch.Tensor
    is_initialized: bool = True


@dataclass(slots=True)
class _Kept:
    layers: dict[int, KeysValues] = field(default_factory=dict)
    nbytes: int = 0


class KeptPictures:
    """By hash, within `capacity` bytes."""

    def __init__(self, layers: frozenset[int], row_bytes: int, capacity: int) -> None:
        """`layers`: those that look at pictures. `row_bytes`: of one row's keys and values in all of them."""
        self.layers = layers
        self.capacity = capacity
        self.bytes = 0
        self.made = 0
        """Pictures whose keys and values were computed."""
        self._row_bytes = row_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._before: frozenset[bytes] = frozenset()

    def begin(self, wanted: Mapping[bytes, int]) -> list[bytes]:
        """A step begins that looks at these pictures, of so many rows: those that must be made."""
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
        """Keep it where there is room for this picture."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        keys, values = made
        kept.layers[layer] = keys.clone(), values.clone()
        return True

    def get(self, layer: int, key: bytes) -> KeysValues:
        """Of a picture that is kept."""
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


class StepPictures(NoCache):
    """The library's cache object for one step: gives layers that look at pictures something to look at, and takes keys
    and values as they make them."""

    def __init__(
        self, kept: KeptPictures, layers: Sequence[HeldLayer], positions: torch.Tensor, wanted: Mapping[bytes, int]
    ) -> None:
        """`wanted`: the rows of each picture of the step."""
        super().__init__(positions)
        self.layers = layers
        self.missing = kept.begin(wanted)
        self._kept = kept
        self._sizes = [wanted[key] for key in self.missing]
        self._now: dict[bytes, KeysValues] = {}
        """Of the layer that runs: what there is no room to keep."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, kv_heads, rows of what is missing, dim] of a layer that looks at pictures; others' are as they are."""
        if layer_idx in self._kept.layers:
            both = zip(keys[0].split(self._sizes, 1), values[0].split(self._sizes, 1), strict=True)
            made = dict(zip(self.missing, both, strict=True))
            self._now = {key: own for key, own in made.items() if not self._kept.put(layer_idx, key, own)}
        return keys, values

    def of(self, layer: int, key: bytes) -> KeysValues:
        """A picture's, in the layer that runs."""
        own = self._now.get(key)
        return self._kept.get(layer, key) if own is None else own


def step_pictures(
    prompts: Sequence[tuple[Prompt | None, int, int]],
    positions: torch.Tensor,
    kept: KeptPictures,
    layers: Sequence[HeldLayer],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What the decoder's forward takes besides, for a flat batch of these tokens; nothing where none of its requests
    has a picture: the layers that look at pictures are left out then, as in the library."""
    rows: dict[bytes, torch.Tensor] = {}
    looks: dict[Seen, list[np.ndarray]] = {}
    unmasked = np.zeros(positions.shape[-1], dtype=np.float32)
    begin = 0
    for prompt, start, stop in prompts:
        if prompt is not None and isinstance(prompt.beside, Shown):
            rows |= prompt.beside.rows
            for first, last, span in prompt.beside.within(start, stop):
                here = slice(begin + first - start, begin + last - start)
                looks.setdefault(span.seen, []).append(np.arange(here.start, here.stop))
                unmasked[here] = span.unmasked
        begin += stop - start
    if not looks:
        return {}
    seen = {key for look in looks for key, _ in look}
    step = StepPictures(kept, layers, positions, {key: len(rows[key]) for key in rows if key in seen})
    device = positions.device
    at = [Look(upload(np.concatenate(places), device), look) for look, places in looks.items()]
    missing = [rows[key].to(device, dtype) for key in step.missing]
    return {
        "past_key_values": step,
        "across": CrossStep(kept.layers, at, step.of),
        "cross_attention_states": torch.cat(missing)[None] if missing else None,
        "full_text_row_masked_out_mask": upload(unmasked, device).to(dtype)[None, None, :, None],
    }
