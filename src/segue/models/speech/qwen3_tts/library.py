"""The parts of transformers that this family uses. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import MimiConfig, MimiModel, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.activations import ACT2FN

__all__ = ["ACT2FN", "MimiConfig", "MimiModel", "Qwen3Config", "Qwen3ForCausalLM", "Qwen3Model"]
"""Qwen3's layers are those of the talker and of the code predictor: with three equal positions, M-RoPE is RoPE. Mimi is
only for tiny checkpoints, whose speech tokenizer has an encoder."""
