"""The parts of transformers that the generic families use. Import them from here: torchvision may need its shim first.

`PAGED` names the decoder's attention implementation, `FLAT` the same without masks; importing them registers them with
transformers.
"""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    WhisperFeatureExtractor,
)
from transformers import __version__ as VERSION
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin
from transformers.conversion_mapping import get_model_conversion_mapping as conversions_of
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as QUANTIZERS
from transformers.utils import ModelOutput
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
from transformers.utils.quantization_config import QuantizationConfigMixin
from transformers.video_processing_utils import BaseVideoProcessor

from segue.kernels.attention.paged_attention import FLAT
from segue.kernels.attention.paged_attention import NAME as PAGED

__all__ = [
    "FLAT",
    "PAGED",
    "QUANTIZERS",
    "VERSION",
    "AutoConfig",
    "AutoFeatureExtractor",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMultimodalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoProcessor",
    "AutoTokenizer",
    "BaseVideoProcessor",
    "CacheLayerMixin",
    "Conv1D",
    "ConversionOps",
    "DynamicCache",
    "GenerationConfig",
    "HfQuantizer",
    "LinearAttentionCacheLayerMixin",
    "ModelOutput",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "ProcessorMixin",
    "QuantizationConfigMixin",
    "WeightConverter",
    "WeightRenaming",
    "WhisperFeatureExtractor",
    "conversions_of",
    "disable_progress_bar",
    "enable_progress_bar",
    "is_progress_bar_enabled",
    "register_quantizer",
    "rename_source_key",
]
