"""The parts of transformers that speculators use. Import them from here: torchvision may need its shim first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from segue.kernels.attention.paged_attention import FLAT

__all__ = ["FLAT", "LlamaConfig", "LlamaDecoderLayer", "LlamaRMSNorm", "LlamaRotaryEmbedding"]
