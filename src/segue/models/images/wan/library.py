"""Further parts of diffusers that Wan uses. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of both libraries fail

from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

__all__ = ["WanCausalConv3d", "prompt_clean", "unpatchify"]
