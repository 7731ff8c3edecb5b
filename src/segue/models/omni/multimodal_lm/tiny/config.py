"""Tiny multimodal models in the formats of published families: configs, special tokens, chat templates and processors.
Everything unrelated to size is as published; templates follow the published ones, shortened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

VOCAB = 672
"""Rows of the embedding: padded, like the published ones."""
END, PAD = "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class Small:
    """One family: the contents of its checkpoints."""

    model_type: str
    special: tuple[str, ...]
    """Special tokens, in the order of their ids from `BASE_VOCAB` on."""
    template: str
    config: Mapping[str, Any]
    """Entries in addition to `text_config` and the ids below."""
    ids: Mapping[str, str]
    """Key of the config → the special token whose id it holds."""
    files: Mapping[str, Mapping[str, Any]]
    """The processor's files."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """`text_config`, in addition to entries that all families share."""
    rows: Mapping[str, float] = field(default_factory=dict)
    """Pattern of the parameters that produce media rows → gain: it makes the rows as large as text embeddings."""
    end_gain: float = 1.5
    """How easily replies end: the factor by which the head's row of the end token is larger than others."""
    end: str = END
    pad: str = PAD
    begin: str | None = None
    """Special token that the tokenizer prepends to a text."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that are named attributes of the tokenizer."""

    def id_of(self, token: str) -> int:
        return BASE_VOCAB + self.special.index(token)


_QWEN_TOKENS = (
    *(PAD, "<|im_start|>", END, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_QWEN_IDS = MappingProxyType(
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
)
_TURN = """\
{%- for message in messages %}
{%- if SYSTEM and loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_LLAVA = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + ' ' }}
{%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{- '<image>\\n' }}{%- endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'video') %}{{- '<video>\\n' }}{%- endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- '\\n' + part.text }}{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_AUDIO = """\
{%- set count = namespace(value=0) %}
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'audio' %}
{%- set count.value = count.value + 1 %}
{{- 'Audio ' + count.value | string + ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}
{%- elif 'text' in part %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.content is string %}{{- message.content | trim }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<start_of_image>' }}
{%- elif part.type == 'text' %}{{- part.text | trim }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
_LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|image|>' }}
{%- elif part.type == 'text' %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
_LLAMA_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
)
_CLIP = MappingProxyType(
    {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
)
_HALF = MappingProxyType({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]})
_QWEN_TOWER = MappingProxyType({"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64})
_QWEN_PATCHES = MappingProxyType({"temporal_patch_size": 2, "merge_size": 2})
_SIDE = {"height": 56, "width": 56}
_LLAVA_PIXELS = {
    **_CLIP,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "size": _SIDE,
    "processor_class": "LlavaOnevisionProcessor",
}
_PINPOINTS = [[56 * rows, 56 * columns] for rows in range(1, 4) for columns in range(1, 4)]

SMALL: Mapping[str, Small] = MappingProxyType(
    {
        "qwen2.5-vl": Small(
            "qwen2_5_vl",
            special=_QWEN_TOKENS,
            template=_TURN.replace("SYSTEM", "true"),
            ids=_QWEN_IDS,
            text={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
            config={
                "vision_config": {
                    "depth": 2,
                    **_QWEN_TOWER,
                    "fullatt_block_indexes": [1],
                    "tokens_per_second": 2,
                }
            },
            rows={r"visual\.merger\.mlp\.2\.weight$": 2.5},
            files={
                "preprocessor_config.json": {
                    **_CLIP,
                    "image_processor_type": "Qwen2VLImageProcessor",
                    "processor_class": "Qwen2_5_VLProcessor",
                    "min_pixels": 3136,
                    "max_pixels": 12845056,
                    "patch_size": 14,
                    **_QWEN_PATCHES,
                }
            },
        ),
        "qwen3-vl": Small(
            "qwen3_vl",
            special=_QWEN_TOKENS,
            template=_TURN.replace("SYSTEM", "false"),
            ids=_QWEN_IDS,
            text={
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "mrope_interleaved": True,
                    "mrope_section": [4, 2, 2],
                },
            },
            config={
                "vision_config": {
                    "depth": 3,
                    **_QWEN_TOWER,
                    "num_position_embeddings": 64,
                    "deepstack_visual_indexes": [0, 1],
                }
            },
            rows={r"visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc2\.weight$": 2.5},
            files={
                "preprocessor_config.json": {
                    **_HALF,
                    "image_processor_type": "Qwen2VLImageProcessorFast",
                    "processor_class": "Qwen3VLProcessor",
                    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
                    "patch_size": 16,
                    **_QWEN_PATCHES,
                },
                "video_preprocessor_config.json": {
                    **_HALF,
                    "video_processor_type": "Qwen3VLVideoProcessor",
                    "processor_class": "Qwen3VLProcessor",
                    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
                    "patch_size": 16,
                    **_QWEN_PATCHES,
                },
            },
        ),
        "llava-onevision": Small(
            "llava_onevision",
            special=(PAD, "<|im_start|>", END, "<image>", "<video>"),
            template=_LLAVA,
            ids={"image_token_index": "<image>", "video_token_index": "<video>"},
            text={"model_type": "qwen2"},
            config={
                "vision_config": {
                    "model_type": "siglip_vision_model",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": _SIDE["height"],
                    "patch_size": 14,
                    "vision_use_head": False,
                },
                "image_grid_pinpoints": _PINPOINTS,
                "vision_aspect_ratio": "anyres_max_9",
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
                "projector_hidden_act": "gelu",
            },
            rows={r"multi_modal_projector\.linear_2\.weight$": 1.5, r"image_newline$": 20.0},
            end_gain=1.7,
            files={
                "preprocessor_config.json": {
                    **_LLAVA_PIXELS,
                    "image_processor_type": "LlavaOnevisionImageProcessor",
                    "image_grid_pinpoints": _PINPOINTS,
                    "do_pad": True,
                },
                "video_preprocessor_config.json": {
                    **_LLAVA_PIXELS,
                    "video_processor_type": "LlavaOnevisionVideoProcessor",
                },
                "processor_config.json": {
                    "processor_class": "LlavaOnevisionProcessor",
                    "image_token": "<image>",
                    "video_token": "<video>",
                    "num_image_tokens": 16,
                    "vision_aspect_ratio": "anyres_max_9",
                    "vision_feature_select_strategy": "full",
                },
            },
        ),
        "gemma3-vision": Small(
            "gemma3",
            special=(
                *("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
                *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
            ),
            template=_GEMMA,
            ids={
                "boi_token_index": "<start_of_image>",
                "eoi_token_index": "<end_of_image>",
                "image_token_index": "<image_soft_token>",
            },
            text={
                "model_type": "gemma3_text",
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 12,  # less than an image's tokens
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                },
            },
            config={
                "mm_tokens_per_image": 16,
                "vision_config": {
                    "model_type": "siglip_vision_model",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": _SIDE["height"],
                    "patch_size": 14,
                    "vision_use_head": False,
                },
            },
            # as large as text embeddings, which are scaled by the root of 64
            rows={r"mm_input_projection_weight$": 8.0},
            end_gain=1.9,
            end="<end_of_turn>",
            pad="<pad>",
            begin="<bos>",
            names={
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            },
            files={
                "preprocessor_config.json": {
                    **_HALF,
                    "do_normalize": True,
                    "do_pan_and_scan": None,
                    "do_rescale": True,
                    "do_resize": True,
                    "image_processor_type": "Gemma3ImageProcessor",
                    "image_seq_length": 16,
                    "processor_class": "Gemma3Processor",
                    "resample": 2,
                    "rescale_factor": 1 / 255,
                    "size": _SIDE,
                },
                "processor_config.json": {"image_seq_length": 16, "processor_class": "Gemma3Processor"},
            },
        ),
        "llama3.2-vision": Small(
            "mllama",
            special=_LLAMA_TOKENS,
            template=_LLAMA,
            ids={"image_token_index": "<|image|>"},
            text={
                # an image's token is the first id beyond the head's vocabulary
                "vocab_size": BASE_VOCAB + len(_LLAMA_TOKENS) - 1,
                "num_hidden_layers": 5,
                "cross_attention_layers": [1, 3],
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 1024,
                },
            },
            config={
                "vision_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_global_layers": 1,
                    "attention_heads": 2,
                    "image_size": _SIDE["height"],
                    "patch_size": 14,
                    "intermediate_layers_indices": [0, 1],
                    "vision_output_dim": 96,
                },
            },
            # gates: the library initialises them to zero, so that images would have no effect
            rows={r"cross_attn_(attn|mlp)_gate$": 8.0, r"vision_model.*\.gate(_attn|_ffn)?$": 10.0},
            end_gain=1.9,
            end="<|eot_id|>",
            pad="<|finetune_right_pad_id|>",
            begin="<|begin_of_text|>",
            files={
                "preprocessor_config.json": {
                    **_CLIP,
                    "do_convert_rgb": True,
                    "do_normalize": True,
                    "do_pad": True,
                    "do_rescale": True,
                    "do_resize": True,
                    "image_processor_type": "MllamaImageProcessor",
                    "max_image_tiles": 4,
                    "processor_class": "MllamaProcessor",
                    "resample": 2,
                    "rescale_factor": 1 / 255,
                    "size": _SIDE,
                },
            },
        ),
        "qwen2-audio": Small(
            "qwen2_audio",
            special=(PAD, "<|im_start|>", END, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
            template=_AUDIO,
            ids={"audio_token_index": "<|AUDIO|>"},
            text={"model_type": "qwen2"},
            config={
                "audio_config": {
                    "model_type": "qwen2_audio_encoder",
                    "d_model": 32,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 64,
                    "num_mel_bins": 128,
                    "max_source_positions": 1500,
                }
            },
            rows={r"multi_modal_projector\.linear\.weight$": 1.5},
            files={
                "preprocessor_config.json": {
                    "feature_extractor_type": "WhisperFeatureExtractor",
                    "processor_class": "Qwen2AudioProcessor",
                    "chunk_length": 30,
                    "feature_size": 128,
                    "hop_length": 160,
                    "n_fft": 400,
                    "n_samples": 480000,
                    "nb_max_frames": 3000,
                    "padding_side": "right",
                    "padding_value": 0.0,
                    "return_attention_mask": True,
                    "sampling_rate": 16000,
                }
            },
        ),
    }
)

_SHARED: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)


def config_values(small: Small) -> dict[str, Any]:
    """The values of a config, under the library's names."""
    begin = None if small.begin is None else small.id_of(small.begin)
    ends = {"bos_token_id": begin, "eos_token_id": small.id_of(small.end), "pad_token_id": small.id_of(small.pad)}
    return {
        **small.config,
        **{key: small.id_of(token) for key, token in small.ids.items()},
        "text_config": {**_SHARED, **small.text, **ends},
        "tie_word_embeddings": False,
    }
