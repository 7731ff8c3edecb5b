"""The parts of transformers that this family uses. Import them from here: torchvision may need its shim first. The
import raises `ConfigError` if the installed version does not have them."""

# ruff: noqa: E402
from importlib.metadata import version

from segue.kernels.torchvision_shim import ensure_torchvision
from segue.models.speech.pocket_tts.graph import check_library

check_library(version("transformers"))
ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers.models.pocket_tts.configuration_pocket_tts import PocketTTSConfig
from transformers.models.pocket_tts.feature_extraction_pocket_tts import PocketTTSFeatureExtractor
from transformers.models.pocket_tts.modeling_pocket_tts import PocketTTSForConditionalGeneration
from transformers.models.pocket_tts.processing_pocket_tts import PocketTTSProcessor
from transformers.models.pocket_tts_audio_tokenizer.configuration_pocket_tts_audio_tokenizer import (
    PocketTTSAudioTokenizerConfig,
)
from transformers.models.pocket_tts_audio_tokenizer.modeling_pocket_tts_audio_tokenizer import (
    PocketTTSAudioTokenizerConv1d,
    PocketTTSAudioTokenizerConvTranspose1d,
    PocketTTSAudioTokenizerModel,
    PocketTTSAudioTokenizerResnetBlock,
)

__all__ = [
    "PocketTTSAudioTokenizerConfig",
    "PocketTTSAudioTokenizerConv1d",
    "PocketTTSAudioTokenizerConvTranspose1d",
    "PocketTTSAudioTokenizerModel",
    "PocketTTSAudioTokenizerResnetBlock",
    "PocketTTSConfig",
    "PocketTTSFeatureExtractor",
    "PocketTTSForConditionalGeneration",
    "PocketTTSProcessor",
]
