"""What a step of the decoder looks at: pictures, whose keys and values are kept (`segue.models.kept_media`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import Prompt
from segue.kernels.cross_attention import CrossStep, KeysValues, Look, Seen
from segue.kernels.staging import upload
from segue.models.kept_media import KeptMedia
from segue.models.multimodal_lm.shown import Shown
from segue.models.no_cache import NoCache


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """A layer of the library's cache: one that has something."""

    keys: torch.Tensor
    """What is not empty; attention asks the step, and does not read it."""
    values: torch.Tensor
    is_initialized: bool = True


class StepPictures(NoCache):
    """The library's cache object for one step: gives layers that look at pictures something to look at, and takes keys
    and values as they make them."""

    def __init__(
        self, kept: KeptMedia, layers: Sequence[HeldLayer], positions: torch.Tensor, wanted: Mapping[bytes, int]
    ) -> None:
        """`wanted`: the rows of each picture of the step."""
        super().__init__(positions)
        self.layers = layers
        self.missing = kept.begin(wanted)
        self._kept = kept
        self._missing = [(key, wanted[key]) for key in self.missing]
        self._now: dict[bytes, KeysValues] = {}
        """Of the layer that runs: what there is no room to keep."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, kv_heads, rows of what is missing, dim] of a layer that looks at pictures; others' are as they are."""
        if layer_idx in self._kept.layers:
            self._now = self._kept.put_all(layer_idx, self._missing, keys[0], values[0])
        return keys, values

    def of(self, layer: int, key: bytes) -> KeysValues:
        """A picture's, in the layer that runs."""
        own = self._now.get(key)
        return self._kept.get(layer, key) if own is None else own


def step_pictures(
    prompts: Sequence[tuple[Prompt | None, int, int]],
    positions: torch.Tensor,
    kept: KeptMedia,
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
