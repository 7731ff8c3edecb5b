"""The parts of transformers that speculators are made of. Import them from here: torchvision has to be mended first."""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that cannot be imported breaks the import of transformers

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from segue.kernels.paged_attention import NAME as PAGED

__all__ = ["PAGED", "LlamaConfig", "LlamaDecoderLayer", "LlamaRMSNorm", "LlamaRotaryEmbedding"]
