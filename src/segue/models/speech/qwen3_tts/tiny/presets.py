"""`segue tiny qwen3-tts`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from segue.models.family import TinyPreset
from segue.models.shared.tiny.files import write_json
from segue.models.shared.tiny.qwen import write_qwen_tokenizer
from segue.models.shared.tiny.sizes import check_size
from segue.models.speech.qwen3_tts.config import GENERATION, SPEECH_TOKENIZER, read_vocoder
from segue.models.speech.qwen3_tts.tiny import config
from segue.models.speech.qwen3_tts.tiny.weights import make_speech_tokenizer, make_talker

SIZES = ("tiny",)
_FEATURES = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}


def make(directory: Path, size: str = "tiny", seed: int = 0, *, kind: str = "custom_voice") -> None:
    """Write a Qwen3-TTS checkpoint with random weights; equal arguments give equal files. `kind`: its
    `tts_model_type`.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    speech = directory / SPEECH_TOKENIZER
    speech.mkdir(parents=True, exist_ok=True)
    write_qwen_tokenizer(directory, config.SPECIAL_TOKENS, config.ROLES, processor_class="Qwen3TTSProcessor")
    values, codec = config.config_json(kind), config.speech_tokenizer_json()
    write_json(directory, "config.json", values)
    write_json(directory, GENERATION, config.GENERATION)
    write_json(directory, "preprocessor_config.json", {"processor_class": "Qwen3TTSProcessor"})
    write_json(speech, "config.json", codec)
    write_json(speech, "configuration.json", {"framework": "pytorch", "task": "feature-extraction"})
    write_json(speech, "preprocessor_config.json", _FEATURES)
    save_torch_state_dict(make_talker(values, seed), directory)
    decoder = read_vocoder(directory).decoder_config
    save_torch_state_dict(make_speech_tokenizer(codec, decoder, seed + 1), speech)


PRESETS = {
    "qwen3-tts": TinyPreset(SIZES, make),
    "qwen3-tts-voice-design": TinyPreset(SIZES, partial(make, kind="voice_design")),
}
