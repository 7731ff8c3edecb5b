"""Configs of the tiny checkpoints, with the keys of the published `config.json` of Qwen2.5-Omni."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

# in the published order, from 151643 on; then the text ids that only the talker's config names
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
SPECIAL_IDS = {token: BASE_VOCAB + index for index, token in enumerate(SPECIAL_TOKENS)}
TTS_PAD, TTS_BOS, TTS_EOS = (BASE_VOCAB + len(SPECIAL_TOKENS) + index for index in range(3))
VOICES = {"Chelsie": TTS_EOS + 1, "Ethan": TTS_EOS + 2}
"""Voice → its text id (`bos_token` in the speaker file)."""
VOCAB = 672
"""Rows of the thinker's embedding: padded, like the published one."""


@dataclass(frozen=True)
class Shape:
    """The numbers that differ between sizes; everything else is as published."""

    thinker_hidden: int
    thinker_layers: int
    thinker_heads: tuple[int, int]
    """Query heads and key/value heads."""
    thinker_intermediate: int
    talker_hidden: int
    talker_layers: int
    talker_heads: tuple[int, int]
    talker_intermediate: int
    head_dim: int
    encoder_layers: int
    encoder_hidden: int
    encoder_heads: int
    codec_vocab: int
    codec_specials: int
    """First special codec id: pad, then start, end, (free), mask; codes have lower ids."""
    dit_hidden: int
    dit_layers: int
    dit_heads: int
    dit_emb: int
    speaker_channels: int
    bigvgan_channels: int
    reference_frames: int


SHAPES = {
    "tiny": Shape(
        thinker_hidden=128,
        thinker_layers=3,
        thinker_heads=(4, 2),
        thinker_intermediate=256,
        talker_hidden=96,
        talker_layers=3,
        talker_heads=(4, 2),
        talker_intermediate=192,
        head_dim=32,
        encoder_layers=2,
        encoder_hidden=64,
        encoder_heads=4,
        codec_vocab=300,
        codec_specials=290,
        dit_hidden=64,
        dit_layers=4,
        dit_heads=2,
        dit_emb=32,
        speaker_channels=32,
        bigvgan_channels=64,
        reference_frames=50,
    ),
    "small": Shape(
        thinker_hidden=768,
        thinker_layers=16,
        thinker_heads=(12, 2),
        thinker_intermediate=2112,
        talker_hidden=512,
        talker_layers=12,
        talker_heads=(8, 2),
        talker_intermediate=1408,
        head_dim=64,
        encoder_layers=2,
        encoder_hidden=256,
        encoder_heads=4,
        codec_vocab=8448,
        codec_specials=8292,
        dit_hidden=128,
        dit_layers=4,
        dit_heads=2,
        dit_emb=128,
        speaker_channels=64,
        bigvgan_channels=128,
        reference_frames=200,
    ),
}


def config_json(shape: Shape) -> dict[str, Any]:
    """The `config.json` of the checkpoint, in the published layout."""
    return {
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "model_type": "qwen2_5_omni",
        "enable_audio_output": True,
        "enable_talker": True,
        "dtype": "float32",
        "thinker_config": _thinker(shape),
        "talker_config": _talker(shape),
        "token2wav_config": _token2wav(shape),
    }


def _rope(head_dim: int) -> dict[str, Any]:
    half = head_dim // 2
    time = half // 4
    space = (half - time) // 2  # 16, 24, 24 of 64 as published
    return {
        "rope_theta": 1000000.0,
        "rope_scaling": {"mrope_section": [time, space, space], "rope_type": "default", "type": "default"},
    }


def _media_ids() -> dict[str, Any]:
    return {
        "audio_token_index": SPECIAL_IDS["<|AUDIO|>"],
        "image_token_index": SPECIAL_IDS["<|IMAGE|>"],
        "video_token_index": SPECIAL_IDS["<|VIDEO|>"],
        "audio_start_token_id": SPECIAL_IDS["<|audio_bos|>"],
        "audio_end_token_id": SPECIAL_IDS["<|audio_eos|>"],
        "vision_start_token_id": SPECIAL_IDS["<|vision_bos|>"],
        "vision_end_token_id": SPECIAL_IDS["<|vision_eos|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
    }


def _thinker(shape: Shape) -> dict[str, Any]:
    ends = {"bos_token_id": SPECIAL_IDS["<|im_start|>"], "eos_token_id": SPECIAL_IDS["<|im_end|>"]}
    return {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        **_media_ids(),
        **ends,
        "vision_token_id": SPECIAL_IDS["<|vision_pad|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            "vocab_size": VOCAB,
            "hidden_size": shape.thinker_hidden,
            "intermediate_size": shape.thinker_intermediate,
            "num_hidden_layers": shape.thinker_layers,
            "num_attention_heads": shape.thinker_heads[0],
            "num_key_value_heads": shape.thinker_heads[1],
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "max_window_layers": shape.thinker_layers,
            "rms_norm_eps": 1e-06,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            **ends,
            **_rope(shape.thinker_hidden // shape.thinker_heads[0]),
        },
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            "num_mel_bins": 128,
            "encoder_layers": shape.encoder_layers,
            "encoder_attention_heads": shape.encoder_heads,
            "encoder_ffn_dim": 2 * shape.encoder_hidden,
            "d_model": shape.encoder_hidden,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": shape.thinker_hidden,
        },
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            "depth": shape.encoder_layers,
            "hidden_size": shape.encoder_hidden,
            "intermediate_size": 2 * shape.encoder_hidden,
            "num_heads": shape.encoder_heads,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [shape.encoder_layers - 1],
            "out_hidden_size": shape.thinker_hidden,
        },
    }


def _talker(shape: Shape) -> dict[str, Any]:
    specials = shape.codec_specials
    return {
        "architectures": ["Qwen2OmniTalkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_talker",
        **_media_ids(),
        "pad_token_id": None,
        "vocab_size": shape.codec_vocab,
        "embedding_size": shape.thinker_hidden,
        "hidden_size": shape.talker_hidden,
        "intermediate_size": shape.talker_intermediate,
        "num_hidden_layers": shape.talker_layers,
        "num_attention_heads": shape.talker_heads[0],
        "num_key_value_heads": shape.talker_heads[1],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "max_window_layers": shape.talker_layers,
        "rms_norm_eps": 1e-06,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "spatial_merge_size": 2,
        "tts_text_pad_token_id": TTS_PAD,
        "tts_text_start_token_id": TTS_BOS,
        "tts_text_end_token_id": TTS_EOS,
        "tts_codec_pad_token_id": specials,
        "tts_codec_start_token_id": specials + 1,
        "tts_codec_end_token_id": specials + 2,
        "tts_codec_mask_token_id": specials + 4,
        **_rope(shape.head_dim),
    }


def _token2wav(shape: Shape) -> dict[str, Any]:
    channels = shape.speaker_channels
    return {
        "architectures": ["Qwen2_5OmniToken2WavModel"],
        "model_type": "qwen2_5_omni_token2wav",
        "dit_config": {
            "model_type": "qwen2_5_omni_dit",
            "hidden_size": shape.dit_hidden,
            "num_hidden_layers": shape.dit_layers,
            "num_attention_heads": shape.dit_heads,
            "head_dim": shape.dit_hidden // shape.dit_heads,
            "ff_mult": 2,
            "emb_dim": shape.dit_emb,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "block_size": 24,
            "look_ahead_layers": [shape.dit_layers // 2],
            "look_backward_layers": [0, shape.dit_layers - 1],
            "repeats": 2,
            "num_embeds": min(8193, shape.codec_specials - 1),
            "mel_dim": 80,
            "dropout": 0.1,
            "enc_emb_dim": 192,
            "enc_dim": channels,
            "enc_channels": [channels] * 4 + [3 * channels],
            "enc_kernel_sizes": [5, 3, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 4, 1],
            "enc_attention_channels": channels // 2,
            "enc_res2net_scale": 2,
            "enc_se_channels": channels // 2,
        },
        "bigvgan_config": {
            "model_type": "qwen2_5_omni_bigvgan",
            "mel_dim": 80,
            "upsample_initial_channel": shape.bigvgan_channels,
            "resblock_kernel_sizes": [3, 7, 11],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
            "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        },
    }
