"""The parts of diffusers that these families use. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of both libraries fail

import diffusers
import transformers
from diffusers import (
    ConfigMixin,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    GGUFQuantizationConfig,
    LCMScheduler,
    ModelMixin,
    SchedulerMixin,
    UniPCMultistepScheduler,
)
from diffusers import __version__ as VERSION
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS as BLOCK_LISTS
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.image_processor import VaeImageProcessor
from diffusers.loaders.single_file_model import FromOriginalModelMixin
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelOutput, ParallelConfig
from diffusers.models.activations import GELU
from diffusers.models.attention import AttentionModuleMixin, FeedForward, JointTransformerBlock
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformerBlock,
)
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from diffusers.models.transformers.transformer_z_image import FeedForward as ZImageFeedForward
from diffusers.utils import convert_unet_state_dict_to_peft
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
"""The libraries that a `model_index.json` may name."""

__all__ = [
    "BLOCK_LISTS",
    "GELU",
    "LIBRARIES",
    "VERSION",
    "Attention",
    "AttentionModuleMixin",
    "AutoConfig",
    "AutoTokenizer",
    "ConfigMixin",
    "ContextParallelConfig",
    "ContextParallelOutput",
    "DPMSolverMultistepScheduler",
    "FeedForward",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "FluxSingleTransformerBlock",
    "FluxTransformerBlock",
    "FromOriginalModelMixin",
    "GGUFQuantizationConfig",
    "HookRegistry",
    "JointTransformerBlock",
    "LCMScheduler",
    "ModelHook",
    "ModelMixin",
    "ParallelConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "QwenDoubleStreamAttnProcessor2_0",
    "QwenImageTransformerBlock",
    "RMSNorm",
    "SchedulerMixin",
    "TransformerBlockMetadata",
    "TransformerBlockRegistry",
    "UniPCMultistepScheduler",
    "VaeImageProcessor",
    "WanTransformerBlock",
    "ZImageFeedForward",
    "apply_context_parallel",
    "attention_backend",
    "convert_unet_state_dict_to_peft",
    "dispatch_attention_fn",
]
