"""Build the cross-attention inputs of one decoder step: images with kept keys and values
(`segue.models.shared.decoder.kept_media`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import Prompt
from segue.kernels.attention.cross_attention import CrossStep, KeysValues, Look, Seen
from segue.kernels.staging import upload
from segue.models.omni.multimodal_lm.cross.shown import Shown
from segue.models.shared.decoder.kept_media import KeptMedia
from segue.models.shared.decoder.no_cache import NoCache


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """A cache layer that reports itself as filled."""

    keys: torch.Tensor
    """Any non-empty tensor: attention takes its keys from the step and does not read it."""
    values: torch.Tensor
    is_initialized: bool = True


class StepImages(NoCache):
    """Stands in for the library's cache during one step: makes cross-attention layers run, and receives the keys and
    values that they compute."""

    def __init__(
        self, kept: KeptMedia, layers: Sequence[HeldLayer], positions: torch.Tensor, wanted: Mapping[bytes, int]
    ) -> None:
        """`wanted`: number of rows of each image of the step."""
        super().__init__(positions)
        self.layers = layers
        self.missing = kept.begin(wanted)
        self._kept = kept
        self._missing = [(key, wanted[key]) for key in self.missing]
        self._now: dict[bytes, KeysValues] = {}
        """Keys and values of the running layer that do not fit into the kept memory."""

    def get_seq_length(self, layer_idx: int = 0) -> int:  # type: ignore[override]
        """More than 0, by which some versions of the library see that a layer is filled; positions are given."""
        return 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Receive [1, kv_heads, rows of missing images, dim] from a cross-attention layer; other layers pass
        through."""
        if layer_idx in self._kept.layers:
            self._now = self._kept.put_all(layer_idx, self._missing, keys[0], values[0])
        return keys, values

    def of(self, layer: int, key: bytes) -> KeysValues:
        """An image's keys and values in the running layer."""
        own = self._now.get(key)
        return self._kept.get(layer, key) if own is None else own


def step_images(
    prompts: Sequence[tuple[Prompt | None, int, int]],
    positions: torch.Tensor,
    kept: KeptMedia,
    layers: Sequence[HeldLayer],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Further arguments of the decoder's forward for a flat batch of these tokens; empty if no request has an image:
    then the cross-attention layers are skipped, as in the library."""
    rows: dict[bytes, torch.Tensor] = {}
    looks: dict[Seen, list[np.ndarray]] = {}
    unmasked = np.zeros(positions.shape[-1], dtype=np.float32)
    begin = 0
    for prompt, start, stop in prompts:
        if prompt is not None and isinstance(prompt.cross_inputs, Shown):
            rows |= prompt.cross_inputs.rows
            for first, last, span in prompt.cross_inputs.within(start, stop):
                here = slice(begin + first - start, begin + last - start)
                looks.setdefault(span.seen, []).append(np.arange(here.start, here.stop))
                unmasked[here] = span.unmasked
        begin += stop - start
    if not looks:
        return {}
    seen = {key for look in looks for key, _ in look}
    step = StepImages(kept, layers, positions, {key: len(rows[key]) for key in rows if key in seen})
    device = positions.device
    at = [Look(upload(np.concatenate(places), device), look) for look, places in looks.items()]
    missing = [rows[key].to(device, dtype) for key in step.missing]
    return {
        "past_key_values": step,
        "across": CrossStep(kept.layers, at, step.of),
        "cross_attention_states": torch.cat(missing)[None] if missing else None,
        "full_text_row_masked_out_mask": upload(unmasked, device).to(dtype)[None, None, :, None],
    }
