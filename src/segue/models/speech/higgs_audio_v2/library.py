"""The parts of transformers that this family uses. Import them from here: torchvision may need its shim first.

The codec's own module imports torchaudio, which has no build for the CPU build of torch and which only its encoder
needs. Its decoder consists of parts of X-Codec and DAC, which are imported from there.
"""

# ruff: noqa: E402
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # a torchvision that fails to import makes the import of transformers fail

from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, HiggsAudioV2TokenizerConfig
from transformers.models.dac.modeling_dac import DacDecoder
from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import HiggsAudioV2Model
from transformers.models.xcodec.modeling_xcodec import (
    XcodecEuclideanCodebook,
    XcodecModel,
    XcodecResidualVectorQuantization,
)

__all__ = [
    "DacDecoder",
    "HiggsAudioV2Config",
    "HiggsAudioV2ForConditionalGeneration",
    "HiggsAudioV2Model",
    "HiggsAudioV2TokenizerConfig",
    "XcodecEuclideanCodebook",
    "XcodecModel",
    "XcodecResidualVectorQuantization",
]
