"""The parts of transformers' Code2Wav that vocoders are built of. Import them from here: torchvision may need its shim
first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeCode2WavTransformerModel,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)

__all__ = [
    "Qwen3OmniMoeCausalConvNet",
    "Qwen3OmniMoeCausalTransConvNet",
    "Qwen3OmniMoeCode2WavConfig",
    "Qwen3OmniMoeCode2WavDecoderBlock",
    "Qwen3OmniMoeCode2WavDecoderResidualUnit",
    "Qwen3OmniMoeCode2WavTransformerModel",
    "Qwen3OmniMoeConvNeXtBlock",
    "Qwen3OmniMoeSnakeBeta",
]
