"""Draw random weights under which text, images and noise levels all matter, and replies end by themselves.

Each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as inputs; the gains were chosen by
measurement (the tests of the tiny preset state the targets).
"""

from __future__ import annotations

import torch
from torch import nn

from segue.models.omni.bagel.config import Config
from segue.models.omni.bagel.decoder import language_model
from segue.models.omni.bagel.drawing.latents import LatentSpace
from segue.models.omni.bagel.loading import autoencoder, language_name, latent_name, vae_name, vision_name
from segue.models.omni.bagel.tiny.config import END
from segue.models.omni.bagel.vision import PositionTable, VisionEncoder
from segue.models.shared.diffusion.tiny import randomise
from segue.models.shared.tiny.weights import prefer

# attention is sharp and outweighs a token's own embedding: otherwise the next token depends only on the last one
_LANGUAGE = {"o_proj": 4.0, r"\.[qk]_norm": 2.2}
_END_GAIN = 3.0
"""How easily a reply ends."""
_VISION = {"connector.fc2": 1.5, "position_embedding": 0.5, r"out_proj|mlp.fc2": 2.0}
_LATENTS = {"llm2vae": 1.3, "time_embedder.mlp.0": 4.0}
_LONGEST_PERIOD = 10000
_VAE = {"decoder.conv_out": 0.77, "encoder.conv_out": 4.8}
"""Images of std 0.5, latents of std 1 after scaling."""
_LOG_VARIANCE = -4.0

Tensors = dict[str, torch.Tensor]


def make_weights(config: Config, speakable: list[int], seed: int) -> Tensors:
    """The tensors of `ema.safetensors`, float32. `speakable`: ids of printable text."""
    language, vision, latents = language_model(config.llm), VisionEncoder(config), LatentSpace(config)
    parts: list[tuple[nn.Module, dict[str, float]]] = [(language, _LANGUAGE), (vision, _VISION), (latents, _LATENTS)]
    for number, (part, gains) in enumerate(parts):
        randomise(part, seed + number, gains)
        _fill_tables(part)
    prefer(language, speakable, END, _END_GAIN)
    tensors = {language_name(name): tensor for name, tensor in language.state_dict().items()}
    tensors |= {vision_name(name): tensor for name, tensor in vision.state_dict().items()}
    return tensors | {latent_name(name): tensor for name, tensor in latents.state_dict().items()}


def make_vae(config: Config, seed: int) -> Tensors:
    """The tensors of `ae.safetensors`, float32."""
    vae, channels = autoencoder(config.vae), config.vae.z_channels
    randomise(vae, seed, _VAE)
    with torch.no_grad():
        vae.encoder.conv_out.weight[channels:] *= 0.1  # the variance stays small
        vae.encoder.conv_out.bias[channels:] = _LOG_VARIANCE
    tensors = {vae_name(name, config.vae): tensor for name, tensor in vae.state_dict().items()}
    return {
        name: tensor[..., None, None] if ".attn_" in name and tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }


def _fill_tables(part: nn.Module) -> None:
    """Set tables of positions to the fixed waves that published ones hold."""
    for module in part.modules():
        if isinstance(module, PositionTable):
            rows, width = module.pos_embed.shape
            with torch.no_grad():
                module.pos_embed.copy_(waves(round(rows**0.5), width))


def waves(side: int, width: int) -> torch.Tensor:
    """[side², width]: sines and cosines of the column, then of the row."""
    steps = torch.arange(width // 4, dtype=torch.float64) / (width // 4)
    angles = torch.arange(side, dtype=torch.float64)[:, None] / _LONGEST_PERIOD**steps
    one = torch.cat([angles.sin(), angles.cos()], 1)
    across, down = one.repeat(side, 1), one.repeat_interleave(side, 0)
    return torch.cat([across, down], 1).float()
