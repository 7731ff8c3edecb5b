"""The parts of transformers and diffusers that this family uses. Import them from here: torchvision may need its shim
first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of both libraries fail

from diffusers import AutoencoderKL
from transformers import PreTrainedModel, Qwen2Config, SiglipVisionConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2MLP,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.siglip.modeling_siglip import SiglipEncoder

__all__ = [
    "ACT2FN",
    "ALL_ATTENTION_FUNCTIONS",
    "AutoencoderKL",
    "BaseModelOutput",
    "Cache",
    "CausalLMOutput",
    "PreTrainedModel",
    "Qwen2Config",
    "Qwen2MLP",
    "Qwen2RMSNorm",
    "Qwen2RotaryEmbedding",
    "SiglipEncoder",
    "SiglipVisionConfig",
    "apply_rotary_pos_emb",
    "create_causal_mask",
]
