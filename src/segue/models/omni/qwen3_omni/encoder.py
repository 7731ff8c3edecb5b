"""Run the thinker's vision and audio encoders as a stage of their own.

n rows of a medium, L layers of the thinker that get deep features, H its hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.contract import LoadContext
from segue.kernels.prepare import Gelu, Plan, prepare
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeThinkerConfig
from segue.models.omni.qwen3_omni.loading import Encoders, load_config, load_encoders
from segue.models.shared.omni.encoder import PATCHES, MediaEncoder, Medium, Shapes


class Encoder(MediaEncoder):
    """`ModuleModel` over the vision encoder, whose deep features come after its rows, and the audio encoder."""

    def __init__(self, ctx: LoadContext) -> None:
        thinker = load_config(ctx).thinker_config
        super().__init__(ctx, _shapes(thinker))
        self._piece = 2 * thinker.audio_config.n_window
        self._net: Encoders = load_encoders(ctx, load_config(ctx))
        prepare(self._net, ctx.device, Plan(rows=PATCHES, gelus=_gelus(self._net), patches=True))

    def encode_images(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode images and clips in one flat call; each attends only to itself. → [n, 1 + L, H] each."""
        grids = torch.tensor([medium.grid for medium in media], device=self.device)
        pixels = torch.cat([medium.data.to(device=self.device, dtype=self.dtype) for medium in media])
        seen = self._net.visual(pixels, grid_thw=grids)
        rows = torch.stack([seen.pooler_output, *seen.deepstack_features], dim=1)
        counts = (grids.prod(-1) // self.shapes.merged).tolist()
        return [own.clone() for own in rows.split(counts)]

    def encode_audio(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode recordings of one width in one flat call, each cut into its own windows. → [n, 1, H] each."""
        frames = [medium.data.shape[1] for medium in media]
        features = [medium.data.to(device=self.device, dtype=self.dtype) for medium in media]
        width = media[0].width
        if max(frames) < width:  # a longer one is in the prompt, and the encoder pads to the longest of its call
            frames.append(width)
            features.append(features[0].new_zeros(self.shapes.mel_bins, width))
        lengths = torch.tensor(frames, device=self.device)
        rows = self._net.audio_tower(torch.cat(features, dim=1), feature_lens=lengths).last_hidden_state
        counts = [self._rows(count) for count in frames]
        return [own[:, None].clone() for own in rows.split(counts)[: len(media)]]

    def _rows(self, frames: int) -> int:
        """Rows of a recording: three convolutions of stride 2 over each piece."""
        whole, rest = divmod(frames, self._piece)
        return whole * -(-self._piece // 8) + -(-rest // 8)


def _gelus(net: Encoders) -> list[Gelu]:
    """Those of the vision encoder's blocks."""
    if net.visual.config.hidden_act != "gelu_pytorch_tanh":
        return []
    layers = [f"visual.blocks.{number}.mlp" for number in range(len(net.visual.blocks))]
    return [Gelu(f"{mlp}.linear_fc1", "tanh", f"{mlp}.linear_fc1", f"{mlp}.act_fn") for mlp in layers]


def _shapes(thinker: Qwen3OmniMoeThinkerConfig) -> Shapes:
    vision = thinker.vision_config
    return Shapes(
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        merged=vision.spatial_merge_size**2,
        mel_bins=thinker.audio_config.num_mel_bins,
    )
