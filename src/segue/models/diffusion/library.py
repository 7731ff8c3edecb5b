"""What these families take from diffusers. Import it from here: torchvision has to be mended first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that cannot be imported breaks the import of both libraries

import diffusers
import transformers
from diffusers import ConfigMixin, ModelMixin, SchedulerMixin
from diffusers import __version__ as VERSION
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS as BLOCK_LISTS
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.image_processor import VaeImageProcessor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
"""What a `model_index.json` may take a part from."""

__all__ = [
    "BLOCK_LISTS",
    "LIBRARIES",
    "VERSION",
    "AutoConfig",
    "AutoTokenizer",
    "ConfigMixin",
    "HookRegistry",
    "ModelHook",
    "ModelMixin",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "SchedulerMixin",
    "TransformerBlockMetadata",
    "TransformerBlockRegistry",
    "VaeImageProcessor",
]
