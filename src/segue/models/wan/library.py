"""What Wan takes from diffusers beyond whole networks. Import it from here: torchvision has to be mended first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that cannot be imported breaks the import of both libraries

from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

__all__ = ["WanCausalConv3d", "prompt_clean", "unpatchify"]
