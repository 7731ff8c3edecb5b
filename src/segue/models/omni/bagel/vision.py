"""Images as rows of the decoder: SigLIP's encoder over patches, and a projection to the decoder's width.

The tower sees a patch as a flat vector and adds a learned position; it has no rotary positions and no pooling head.

n patches, D width of the tower, H hidden size of the decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segue.models.omni.bagel.config import Config, VisionConfig
from segue.models.omni.bagel.library import ACT2FN, SiglipEncoder, SiglipVisionConfig


def patches(image: Tensor, size: int) -> Tensor:
    """[channels, height, width] → [n, size · size · channels], row by row; within a patch, channels change fastest."""
    channels, height, width = image.shape
    cut = image.reshape(channels, height // size, size, width // size, size)
    return cut.permute(1, 3, 2, 4, 0).reshape(-1, size * size * channels)


def unpatched(tokens: Tensor, size: int, down: int, across: int) -> Tensor:
    """The inverse of `patches`, for `down` × `across` of them."""
    cut = tokens.reshape(down, across, size, size, -1)
    return cut.permute(4, 0, 2, 1, 3).reshape(-1, down * size, across * size)


def places(down: int, across: int, side: int) -> Tensor:
    """[n] long: rows of a table of `side` × `side` positions, for an image in its upper left corner."""
    return (torch.arange(down)[:, None] * side + torch.arange(across)).flatten()


class PositionTable(nn.Module):
    """Fixed positions on a square, added to rows of the decoder's width."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(side**2, width))

    def forward(self, at: Tensor) -> Tensor:
        """[n] long → [n, width]."""
        return self.pos_embed[at]


class Projection(nn.Module):
    """[…, D] → […, H]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, outputs)
        self.fc2 = nn.Linear(outputs, outputs)
        self.act = ACT2FN["gelu_pytorch_tanh"]

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(rows)))
        return out


class Embeddings(nn.Module):
    """A patch as a vector of the tower's width, with its position."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.side**2, config.hidden_size)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        out: Tensor = self.patch_embedding(tokens) + self.position_embedding(at)
        return out


class VisionEncoder(nn.Module):
    """Tower, projection, and the decoder's positions of patches."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        vit = config.vit
        self.embeddings = Embeddings(vit)
        self.encoder = SiglipEncoder(
            SiglipVisionConfig(
                hidden_size=vit.hidden_size,
                intermediate_size=vit.intermediate_size,
                num_hidden_layers=vit.layers,
                num_attention_heads=vit.num_attention_heads,
                hidden_act=vit.hidden_act,
                layer_norm_eps=vit.layer_norm_eps,
                attn_implementation="sdpa",
            )
        )
        self.post_layernorm = nn.LayerNorm(vit.hidden_size, eps=vit.layer_norm_eps)
        self.connector = Projection(vit.hidden_size, config.llm.hidden_size)
        self.vit_pos_embed = PositionTable(vit.side, config.llm.hidden_size)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Images of one shape: their `patches` [images, n, channels · size²] in [-1, 1] and the `places` of each [n] →
        [images, n, H]."""
        hidden = self.encoder(inputs_embeds=self.embeddings(tokens, at)).last_hidden_state
        out: Tensor = self.connector(self.post_layernorm(hidden)) + self.vit_pos_embed(at)
        return out
