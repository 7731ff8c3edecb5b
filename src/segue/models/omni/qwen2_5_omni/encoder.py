"""Run the thinker's vision and audio encoders as a stage of their own.

n rows of a medium, H the thinker's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.contract import LoadContext
from segue.kernels.prepare import Plan, prepare
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniThinkerConfig
from segue.models.omni.qwen2_5_omni.loading import Encoders, load_config, load_encoders
from segue.models.shared.omni.encoder import PATCHES, MediaEncoder, Medium, Shapes


class Encoder(MediaEncoder):
    """`ModuleModel` over the vision and the audio encoder."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        super().__init__(ctx, _shapes(config.thinker_config))
        self._net: Encoders = load_encoders(ctx, config)
        prepare(self._net, ctx.device, Plan(rows=PATCHES, patches=True))

    def encode_images(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode images and clips in one flat call; each attends only to itself. → [n, H] each."""
        grids = torch.tensor([medium.grid for medium in media], device=self.device)
        pixels = torch.cat([medium.data.to(device=self.device, dtype=self.dtype) for medium in media])
        merged = self._net.visual(pixels, grid_thw=grids).pooler_output
        counts = (grids.prod(-1) // self.shapes.merged).tolist()
        return [rows.clone() for rows in merged.split(counts)]

    def encode_audio(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode recordings in one flat call, each cut into its own windows. → [n, H] each."""
        lengths = torch.tensor([medium.data.shape[1] for medium in media], device=self.device)
        features = torch.cat([medium.data.to(device=self.device) for medium in media], dim=1)
        tower = self._net.audio_tower
        after_conv, counts = tower._get_feat_extract_output_lengths(lengths)
        rows = tower(features, feature_lens=lengths, aftercnn_lens=after_conv).last_hidden_state
        return [own.clone() for own in rows.split(counts.tolist())]


def _shapes(thinker: Qwen2_5OmniThinkerConfig) -> Shapes:
    vision = thinker.vision_config
    return Shapes(
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        merged=vision.spatial_merge_size**2,
        mel_bins=thinker.audio_config.num_mel_bins,
    )
