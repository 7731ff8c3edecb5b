"""M-RoPE positions by the `get_rope_index` of Qwen2.5-Omni."""

from __future__ import annotations

from typing import cast

from segue.models.omni.qwen2_5_omni.library import (
    Qwen2_5OmniPreTrainedModelForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
)
from segue.models.shared.omni import positions
from segue.models.shared.omni.positions import MediumFacts, RopeIndex, facts_of

__all__ = ["MediumFacts", "Positions", "facts_of"]


class _Index(Qwen2_5OmniPreTrainedModelForConditionalGeneration):
    """A thinker without weights."""

    def __init__(self, config: Qwen2_5OmniThinkerConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.vision_config.spatial_merge_size


class Positions(positions.Positions):
    """Computes the positions of a prompt's tokens and of the tokens that follow."""

    def __init__(self, config: Qwen2_5OmniThinkerConfig) -> None:
        super().__init__(cast(RopeIndex, _Index(config)))
