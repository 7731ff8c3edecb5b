"""The config files of a BAGEL checkpoint as values. No torch here.

`llm_config.json` and `vit_config.json` state the language model and the vision tower. The published files leave out the
rest: the VAE is FLUX.1's, and the side of the table of latent positions is that of its tensor. A smaller checkpoint
states `vae_config` in its `config.json`.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.files import read_object

WEIGHTS = "ema.safetensors"
VAE_WEIGHTS = "ae.safetensors"
LATENT_POSITIONS = "latent_pos_embed.pos_embed"
"""The tensor of latent positions: [side², hidden size]."""


class LanguageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`llm_config.json`. Both experts have these sizes; queries and keys are normalised per head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`vit_config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    num_channels: int = 3
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @property
    def layers(self) -> int:
        """Layers in the checkpoint: the config counts the original tower's last one, which BAGEL drops."""
        return self.num_hidden_layers - 1

    @property
    def side(self) -> int:
        """Patches per side of the largest image, which is the side of both tables of patch positions."""
        return self.image_size // self.patch_size


class VaeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`vae_config` of `config.json`, with the sizes of FLUX.1's VAE."""

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    scale_factor: float = 0.3611
    shift_factor: float = 0.1159

    @property
    def downsample(self) -> int:
        """Pixels per latent, in height and in width."""
        return int(2 ** (len(self.ch_mult) - 1))


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All config files of a checkpoint."""

    llm: LanguageConfig
    vit: VisionConfig
    vae: VaeConfig = VaeConfig()
    latent_patch_size: int = 2
    """Latents per side of a token."""
    latent_side: int = 64
    """Tokens per side of the largest image that can be drawn."""

    @property
    def token_pixels(self) -> int:
        """Pixels per side of a token of latents."""
        return self.vae.downsample * self.latent_patch_size

    @property
    def token_channels(self) -> int:
        """Numbers in a token of latents."""
        return self.vae.z_channels * self.latent_patch_size**2


class _Root(msgspec.Struct):
    """The keys of `config.json` that count; the published file has only the model's name."""

    vae_config: VaeConfig = VaeConfig()
    latent_patch_size: int = 2


def read_config(model_dir: Path) -> Config:
    """The config files, and the shape of one tensor if there are weights. Raises `ConfigError` with file and key."""
    root = _converted(model_dir / "config.json", _Root)
    config = Config(
        llm=_converted(model_dir / "llm_config.json", LanguageConfig),
        vit=_converted(model_dir / "vit_config.json", VisionConfig),
        vae=root.vae_config,
        latent_patch_size=root.latent_patch_size,
    )
    side = _latent_side(model_dir / WEIGHTS)
    return config if side is None else msgspec.structs.replace(config, latent_side=side)


T = TypeVar("T")


def _converted(path: Path, kind: type[T]) -> T:
    values: dict[str, Any] = read_object(path)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", field="model") from error


def _latent_side(path: Path) -> int | None:
    """The side of the table of latent positions, from the header of the weights; None without weights."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            rows: int = file.get_slice(LATENT_POSITIONS).get_shape()[0]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot read tensor {LATENT_POSITIONS!r}: {error}", field="model") from error
    if isqrt(rows) ** 2 != rows:
        raise ConfigError(f"{path}: tensor {LATENT_POSITIONS!r} has {rows} rows; right is a square number")
    return isqrt(rows)
