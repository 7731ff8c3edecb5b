"""Configs of the tiny checkpoint, with the keys of the library's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

MARKS = {
    "audio_prompt_token": "<|audio_prompt|>",
    "audio_latent_token": "<|audio_latent|>",
    "audio_prompt_bos_token": "<|audio_prompt_bos|>",
    "audio_bos_token": "<|audio_bos|>",
}
"""The tokenizer's attributes that the library's processor reads, in the order of the ids."""
PAD = "<pad>"
SPECIAL_TOKENS = (*MARKS.values(), PAD)
IDS = {token: BASE_VOCAB + index for index, token in enumerate(SPECIAL_TOKENS)}
TEMPLATE = (
    "{%- for message in messages %}{%- for part in message['content'] if part['type'] == 'audio' %}"
    "{{- '<|audio_prompt_bos|><|audio_prompt|>' }}{%- endfor %}"
    "{%- for part in message['content'] if part['type'] == 'text' %}{{- part['text'] }}{%- endfor %}{%- endfor %}"
    "{{- '<|audio_bos|>' }}"
)
VOICES = {"alba": 5, "marius": 9}
"""Frames of each voice."""
THRESHOLD = -4.0


@dataclass(frozen=True)
class Shape:
    """The numbers that differ between sizes; everything else is as the library's defaults."""

    hidden: int
    layers: int
    heads: int
    latent: int
    flow_hidden: int
    flow_layers: int
    codec_hidden: int
    codec_layers: int
    codec_filters: int


SHAPES = {
    "tiny": Shape(
        hidden=64,
        layers=3,
        heads=4,
        latent=8,
        flow_hidden=48,
        flow_layers=2,
        codec_hidden=32,
        codec_layers=2,
        codec_filters=4,
    ),
}


def config_json(shape: Shape) -> dict[str, Any]:
    """The `config.json` of the language model."""
    ids = {f"{name}_id": IDS[token] for name, token in MARKS.items()}
    return {
        "architectures": ["PocketTTSForConditionalGeneration"],
        "model_type": "pocket_tts",
        "dtype": "float32",
        "vocab_size": BASE_VOCAB + len(SPECIAL_TOKENS),
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": 2048,
        "latent_dim": shape.latent,
        "pad_token_id": IDS[PAD],
        **ids,
        "flow_head_config": {
            "condition_dim": shape.hidden,
            "hidden_size": shape.flow_hidden,
            "latent_dim": shape.latent,
            "num_hidden_layers": shape.flow_layers,
        },
    }


def codec_json(shape: Shape) -> dict[str, Any]:
    """The `config.json` of the audio tokenizer."""
    return {
        "architectures": ["PocketTTSAudioTokenizerModel"],
        "model_type": "pocket_tts_audio_tokenizer",
        "dtype": "float32",
        "hidden_size": shape.codec_hidden,
        "intermediate_size": 2 * shape.codec_hidden,
        "latent_dim": shape.latent,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_filters": shape.codec_filters,
        "num_hidden_layers": shape.codec_layers,
        "upsample_groups": shape.codec_hidden,
    }
