"""The parts of transformers that this family uses. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import (
    PreTrainedModel,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeTalkerForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoePreTrainedModelForConditionalGeneration,
    Qwen3OmniMoeVisionEncoder,
)

__all__ = [
    "PreTrainedModel",
    "Qwen3OmniMoeAudioEncoder",
    "Qwen3OmniMoeCode2Wav",
    "Qwen3OmniMoeConfig",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
    "Qwen3OmniMoeProcessor",
    "Qwen3OmniMoeTalkerForConditionalGeneration",
    "Qwen3OmniMoeThinkerConfig",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3OmniMoeVisionEncoder",
    "get_checkpoint_conversion_mapping",
    "register_checkpoint_conversion_mapping",
]
