"""Tiny checkpoints of families that hear, in the form of `multimodal_others`."""

from __future__ import annotations

from typing import Any

from multimodal_parts import TEXT_CONFIG, TURNS

from segue.models.omni.multimodal_lm.tiny.config import SMALL

_TEMPLATE = SMALL["qwen2-audio"].template.replace("<|audio_bos|><|AUDIO|><|audio_eos|>", "<sound>")
_AUDIO = 643
_WHISPER = SMALL["qwen2-audio"].files["preprocessor_config.json"]
_QWEN3 = {**TEXT_CONFIG, "model_type": "qwen3"}

AUDIO: dict[str, dict[str, Any]] = {
    "glmasr": {
        "one": True,  # recording in a prompt, its processor takes no more
        "config": {
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "num_mel_bins": 128,
            },
            "audio_token_id": _AUDIO,
        },
        "processor": {"processor_class": "GlmAsrProcessor", "audio_token": "<sound>"},
        "pixels": _WHISPER,
        "special": (*TURNS, "<sound>"),
        "template": _TEMPLATE,
    },
    "qwen3_asr": {
        "one": True,  # recording in a prompt, its processor takes no more
        "config": {
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "output_dim": 64,
                "downsample_hidden_size": 16,
            },
            "text_config": _QWEN3,
            "audio_token_id": _AUDIO,
        },
        "processor": {"processor_class": "Qwen3ASRProcessor"},
        "pixels": {**_WHISPER, "feature_extractor_type": "Qwen3ASRFeatureExtractor"},
        "special": (*TURNS, "<sound>", "<|audio_start|>", "<|audio_end|>", "<timestamp>"),
        "template": _TEMPLATE.replace("<sound>", "<|audio_start|><sound><|audio_end|>"),
        "tokens": {
            "audio_token": "<sound>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
            "timestamp_token": "<timestamp>",
        },
    },
    "moss_transcribe_diarize": {
        "config": {
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "text_config": _QWEN3,
            "audio_token_id": _AUDIO,
        },
        "processor": {
            "processor_class": "MossTranscribeDiarizeProcessor",
            "audio_token": "<sound>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        "pixels": {"feature_extractor_type": "MossTranscribeDiarizeFeatureExtractor"},
        "special": (*TURNS, "<sound>", "<|audio_start|>", "<|audio_end|>"),
        "template": _TEMPLATE.replace("<sound>", "<|audio_start|><sound><|audio_end|>"),
    },
}
