"""The parts of transformers that this family uses. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniTalkerConfig,
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniPreTrainedModelForConditionalGeneration,
    Qwen2_5OmniToken2WavModel,
    Qwen2_5OmniVisionEncoder,
)

__all__ = [
    "AutoTokenizer",
    "GenerationConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "Qwen2_5OmniAudioEncoder",
    "Qwen2_5OmniConfig",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniPreTrainedModelForConditionalGeneration",
    "Qwen2_5OmniProcessor",
    "Qwen2_5OmniTalkerConfig",
    "Qwen2_5OmniTalkerForConditionalGeneration",
    "Qwen2_5OmniThinkerConfig",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniToken2WavModel",
    "Qwen2_5OmniVisionEncoder",
    "Qwen2_5OmniVisionEncoderConfig",
]
