"""The parts of transformers this family is made of. Import them from here: torchvision has to be mended first.

`PAGED` is the attention a decoder is set to; importing it makes it known to transformers.
"""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that cannot be imported breaks the import of transformers

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniTalkerConfig,
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerTextModel,
)
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniPreTrainedModelForConditionalGeneration,
    Qwen2_5OmniToken2WavModel,
    Qwen2_5OmniVisionEncoder,
)

from segue.kernels.paged_attention import NAME as PAGED

__all__ = [
    "PAGED",
    "AutoTokenizer",
    "GenerationConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "Qwen2_5OmniAudioEncoder",
    "Qwen2_5OmniConfig",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniPreTrainedModelForConditionalGeneration",
    "Qwen2_5OmniTalkerConfig",
    "Qwen2_5OmniTalkerForConditionalGeneration",
    "Qwen2_5OmniThinkerConfig",
    "Qwen2_5OmniThinkerTextModel",
    "Qwen2_5OmniToken2WavModel",
    "Qwen2_5OmniVisionEncoder",
    "Qwen2_5OmniVisionEncoderConfig",
]
