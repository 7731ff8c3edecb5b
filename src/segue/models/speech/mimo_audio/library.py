"""The parts of transformers that this family uses. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from transformers.audio_utils import mel_filter_bank

__all__ = ["DynamicCache", "Qwen2Config", "Qwen2ForCausalLM", "Qwen2Model", "mel_filter_bank"]
