"""The parts of transformers that this family uses. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    CsmProcessor,
    DynamicCache,
    MimiConfig,
    MimiModel,
)
from transformers.models.mimi.modeling_mimi import MimiConv1d, MimiConvTranspose1d, MimiResnetBlock

__all__ = [
    "CsmConfig",
    "CsmForConditionalGeneration",
    "CsmProcessor",
    "DynamicCache",
    "MimiConfig",
    "MimiConv1d",
    "MimiConvTranspose1d",
    "MimiModel",
    "MimiResnetBlock",
]
