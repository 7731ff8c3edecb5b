"""Tiny language models in the formats of published families: their configs, special tokens and chat templates.

Templates follow the published ones, shortened to messages, a system message, tools if the family has them, and the
generation prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from segue.models.shared.tiny.files import BASE_VOCAB

VOCAB = 672
"""Rows of the embedding in size `tiny`: padded, like the published ones."""


@dataclass(frozen=True)
class Small:
    """One family: the contents of its checkpoints, and the shapes of its sizes."""

    model_type: str
    special: tuple[str, ...]
    """Special tokens, in the order of their ids from `BASE_VOCAB` on."""
    ends: tuple[str, ...]
    """The tokens that end a reply; the first is the tokenizer's `eos_token`."""
    pad: str
    template: str | None
    begin: str | None = None
    """The token that the tokenizer prepends to a text."""
    tokenizer_class: str = "PreTrainedTokenizerFast"
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Config values of size `tiny`, in addition to those that all families share."""
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further sizes: overrides of the published default config."""
    end_gain: float = 2.0
    """How easily replies end: the factor by which the head's row of the first end token is larger than others."""
    embedding_std: float = 1.0
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Shared config values that this family names differently."""

    def id_of(self, token: str) -> int:
        return BASE_VOCAB + self.special.index(token)


_SHARED: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
)

_CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call, return <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
_LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
_MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}
{%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate: user, assistant, user, assistant, ...') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
"""
_GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else 'user' %}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
_PHI = """\
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
_HARMONY = """\
{%- for message in messages %}
{{- '<|start|>' + message.role }}
{%- if message.role == 'assistant' %}{{- '<|channel|>final' }}{%- endif %}
{{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
_OLMO = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + (eos_token if message.role == 'assistant' else '') + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

_QWEN: dict[str, Any] = {
    "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "ends": ("<|im_end|>", "<|endoftext|>"),
    "pad": "<|endoftext|>",
    "template": _CHATML,
    "tokenizer_class": "Qwen2Tokenizer",
}
_MISTRALS: dict[str, Any] = {
    "special": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
    "ends": ("</s>",),
    "pad": "</s>",
    "begin": "<s>",
    "template": _MISTRAL,
}
_GPT: dict[str, Any] = {"special": ("<|endoftext|>",), "ends": ("<|endoftext|>",), "pad": "<|endoftext|>"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

SMALL: Mapping[str, Small] = MappingProxyType(
    {
        "llama": Small(
            "llama",
            special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            ends=("<|eot_id|>", "<|end_of_text|>"),
            pad="<|end_of_text|>",
            begin="<|begin_of_text|>",
            template=_LLAMA,
            end_gain=1.7,
        ),
        "mistral": Small("mistral", **_MISTRALS, shape={"sliding_window": 48}),
        "mixtral": Small("mixtral", **_MISTRALS, shape=_EXPERTS),
        "qwen2": Small(
            "qwen2",
            **_QWEN,
            sizes={
                # the shape of Qwen2-0.5B with a vocabulary of 16,000 and an untied head: 387 million parameters
                "387m": {
                    "vocab_size": 16000,
                    "hidden_size": 896,
                    "intermediate_size": 4864,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 14,
                    "num_key_value_heads": 2,
                    "max_window_layers": 24,
                    "max_position_embeddings": 32768,
                    "tie_word_embeddings": False,
                }
            },
        ),
        "qwen3": Small(
            "qwen3",
            **_QWEN,
            shape={"head_dim": 16},
            sizes={
                "33m": {
                    "vocab_size": 16000,
                    "hidden_size": 384,
                    "intermediate_size": 1920,
                    "num_hidden_layers": 8,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "head_dim": 64,
                    "max_position_embeddings": 32768,
                    "tie_word_embeddings": False,
                }
            },
        ),
        "qwen3-moe": Small(
            "qwen3_moe",
            **_QWEN,
            shape={
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
            },
        ),
        "gemma3": Small(
            "gemma3_text",
            special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
            ends=("<end_of_turn>", "<eos>"),
            pad="<pad>",
            begin="<bos>",
            template=_GEMMA,
            embedding_std=0.125,  # the model multiplies by the root of the hidden size
            shape={
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "num_hidden_layers": 4,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "tie_word_embeddings": True,
            },
        ),
        "phi3": Small(
            "phi3",
            special=("<unk>", "<s>", "</s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
            ends=("<|end|>", "<|endoftext|>"),
            pad="<|endoftext|>",
            template=_PHI,
            shape={"original_max_position_embeddings": 1024},
        ),
        "gpt-oss": Small(
            "gpt_oss",
            special=(
                *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>"),
                *("<|message|>", "<|call|>"),
            ),
            ends=("<|return|>", "<|endoftext|>", "<|call|>"),
            pad="<|endoftext|>",
            template=_HARMONY,
            shape={
                **_EXPERTS,
                "head_dim": 16,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
            },
        ),
        "olmo": Small(
            "olmo2",
            special=("<|endoftext|>", "<|pad|>"),
            ends=("<|endoftext|>",),
            pad="<|pad|>",
            begin="<|endoftext|>",
            template=_OLMO,
        ),
        "gpt2": Small(
            "gpt2",
            **_GPT,
            template=None,
            end_gain=1.5,
            shape={"tie_word_embeddings": True},
            renamed={
                "hidden_size": "n_embd",
                "intermediate_size": "n_inner",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions",
                "num_key_value_heads": "",
            },
        ),
    }
)


def config_values(small: Small, size: str) -> dict[str, Any]:
    """The values of a config, under the library's names."""
    shape = {**_SHARED, **small.shape} if size == "tiny" else dict(small.sizes[size])
    named = {small.renamed.get(name, name): value for name, value in shape.items()}
    named.pop("", None)
    return {
        **named,
        "bos_token_id": None if small.begin is None else small.id_of(small.begin),
        "eos_token_id": [small.id_of(token) for token in small.ends],
        "pad_token_id": small.id_of(small.pad),
    }
