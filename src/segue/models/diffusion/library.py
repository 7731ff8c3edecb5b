"""What these families take from diffusers. Import it from here: torchvision has to be mended first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that cannot be imported breaks the import of both libraries

import diffusers
import transformers
from diffusers import ConfigMixin, ModelMixin, SchedulerMixin
from diffusers import __version__ as VERSION
from diffusers.image_processor import VaeImageProcessor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
"""What a `model_index.json` may take a part from."""

__all__ = [
    "LIBRARIES",
    "VERSION",
    "AutoConfig",
    "AutoTokenizer",
    "ConfigMixin",
    "ModelMixin",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "SchedulerMixin",
    "VaeImageProcessor",
]
