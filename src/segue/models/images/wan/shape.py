"""Read from a checkpoint's configs its shapes and the requests that it supports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError
from segue.models.images.wan.graph import has_part, sees
from segue.models.shared.diffusion.loading import component_config, pipeline_index

TEXT_TOKENS = 512
"""Tokens of a prompt. The cross-attention of Wan 2.1's image models treats all tokens except the last 512 as the
image's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shapes of one checkpoint. Sizes are (frames, height, width)."""

    scale: tuple[int, int, int]
    """Frames and pixels per latent; the first frame is a separate latent."""
    patch: tuple[int, int, int]
    """Latents per token."""
    channels: int
    """Channels of the denoised latents."""
    images: tuple[int, int]
    """Minimum and maximum number of images of a request."""
    timestep_per_token: bool
    """TI2V: tokens of the given frame have timestep 0, and the image's latents replace the noise."""
    looks: bool
    """Wan 2.1: the network also attends to CLIP's image embeddings."""
    seen: int
    """Tokens of CLIP's embedding of an image."""
    boundary: float | None
    """With two experts: the first runs timesteps from this one on, the second those below it."""

    @classmethod
    def of(cls, model_dir: Path) -> Shape:
        """Raises `ConfigError` for inconsistent parts."""
        index = pipeline_index(model_dir)
        network, vae = component_config(model_dir, "transformer"), component_config(model_dir, "vae")
        ratio = index.get("boundary_ratio")
        if (ratio is not None) != has_part(index, "transformer_2"):
            raise ConfigError(
                f"{model_dir}: boundary_ratio is {ratio!r} in model_index.json; it goes with a transformer_2",
                field="model",
            )
        scheduler = component_config(model_dir, "scheduler", "scheduler_config.json")
        across, along = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
        looks = network.get("image_dim") is not None
        if looks and not (sees(index) and has_part(index, "image_encoder") and has_part(index, "image_processor")):
            raise ConfigError(
                f"{model_dir}: its transformer has an image_dim; it goes with a WanImageToVideoPipeline that has an "
                "image_encoder and an image_processor",
                field="model",
            )
        patch_frames, patch_height, patch_width = network.get("patch_size", (1, 2, 2))
        return cls(
            scale=(along, across, across),
            patch=(patch_frames, patch_height, patch_width),
            channels=vae.get("z_dim", 16),
            images=_images(sees(index), bool(index.get("expand_timesteps")), looks, network),
            timestep_per_token=bool(index.get("expand_timesteps")),
            looks=looks,
            seen=_seen(component_config(model_dir, "image_encoder")) if looks else 0,
            boundary=None if ratio is None else ratio * scheduler.get("num_train_timesteps", 1000),
        )

    def latents(self, params: DiffusionParams) -> tuple[int, int, int, int]:
        """[channels, frames, height, width] of one video."""
        assert params.num_frames is not None
        assert params.height is not None
        assert params.width is not None
        along, down, across = self.scale
        return (self.channels, (params.num_frames - 1) // along + 1, params.height // down, params.width // across)


def _images(seeing: bool, per_token: bool, looks: bool, network: dict[str, object]) -> tuple[int, int]:
    """The number of images. The library's pipeline accepts a last image if the network has positions for both (Wan 2.1
    FLF2V), or does not use CLIP (Wan 2.2 A14B)."""
    if not seeing:
        return (0, 0)
    if per_token:
        return (0, 1)
    if looks:
        return (2, 2) if network.get("pos_embed_seq_len") is not None else (1, 1)
    return (1, 2)


def _seen(clip: dict[str, int]) -> int:
    """One token per patch of the image, and one for the whole image."""
    return (clip["image_size"] // clip["patch_size"]) ** 2 + 1
