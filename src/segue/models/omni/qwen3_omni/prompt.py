"""Build the thinker's prompt: media rows in the place of their placeholders, positions, and identities for caching.

T prompt tokens, n rows of one medium, L layers that get deep features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.engines.autoregressive.contract import Prompt
from segue.models.omni.qwen3_omni.library import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
)
from segue.models.shared.decoder.deep_features import DEEP, MEDIA
from segue.models.shared.omni.positions import positions_of
from segue.models.shared.omni.prompt import MEDIA_ROWS, Arrived, MediaPlaces, by_modality, media_rows

FACTS = "facts"
"""`Prompt.extras`: the `MediumFacts` of the prompt's media."""


class Prompts:
    """Builds the prompts of one thinker."""

    def __init__(
        self, config: Qwen3OmniMoeThinkerConfig, embed: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        """`embed`: [n] ids → [n, H]."""
        self._positions = positions_of(Qwen3OmniMoePreTrainedModelForConditionalGeneration, config)
        self._embed = embed
        self._device = device
        self._places = MediaPlaces(config)

    @torch.inference_mode()
    def __call__(self, arrived: Arrived) -> Prompt:
        """Raises `InvalidRequest` for ids and media that do not match, `StageFailed` for rows of other media."""
        ids = arrived.token_ids
        assert ids is not None
        places = self._places(ids, arrived)
        if not places:
            return Prompt(token_ids=ids.tolist(), modality_tokens={"text": len(ids)})
        # on the host: the engine does not account device memory that a request holds beyond its KV
        embeds = self._embed(ids.to(self._device)).cpu()
        layers = max(rows.shape[1] for _, _, rows in arrived.rows) - 1
        deep = embeds.new_zeros(len(ids), layers, embeds.shape[1])
        seen = torch.zeros(len(ids), dtype=torch.bool)
        for kind, where in places.items():
            own = torch.cat([rows for of, _, rows in arrived.rows if of == kind]).to(embeds)
            embeds[where] = own[:, 0]
            deep[where, : own.shape[1] - 1] = own[:, 1:]
            seen |= where if own.shape[1] > 1 else False
        positions, delta = None, 0
        if places.keys() - {"audio"}:
            positions, delta = self._positions(ids, arrived.media, use_audio_in_video=arrived.use_audio_in_video)
            positions = positions.to(self._device)
        return Prompt(
            token_ids=ids.tolist(),
            embeds=embeds,
            positions=positions,
            position_delta=delta,
            identity=self._places.identity(ids, arrived),
            modality_tokens=by_modality(ids, places),
            extras={MEDIA_ROWS: media_rows(places), FACTS: arrived.media}
            | ({MEDIA: seen, DEEP: deep[seen]} if layers else {}),
        )
