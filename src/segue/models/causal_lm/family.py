"""Any causal language model of transformers, as the registry knows it: what no other family names. No torch here.

What can be told from `config.json` is refused here, before a process is started; the worker compares with the library
itself (`segue.models.decoder`, `segue.engines.autoregressive.check`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.causal_lm.graph import graph
from segue.models.chat_template import read_chat_template
from segue.models.family import Family

_SUFFIXES = ("ForCausalLM", "LMHeadModel")
TINY = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma3", "phi3", "gpt-oss", "olmo", "gpt2")
"""The families that `segue tiny` knows."""
_OTHER_SENSES = ("vision_config", "audio_config")
_STATE_SPACE = frozenset(
    (
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "jamba", "bamba", "zamba", "zamba2", "falcon_h1"),
        *("nemotron_h", "recurrent_gemma", "minimax", "qwen3_next", "lfm2", "lfm2_moe", "olmo_hybrid"),
    )
)
_ATTENTION = frozenset(("full_attention", "sliding_attention", "attention"))
"""Layer types that keep keys and values."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A causal LM without encoders. Raises `ConfigError` for one that is known not to be served, with the reason."""
    names = config.get("architectures") or []
    if not any(str(name).endswith(_SUFFIXES) for name in names) or any(key in config for key in _OTHER_SENSES):
        return False
    if reason := unserved(config):
        raise ConfigError(f"{names[0]} cannot be served: {reason}", field="architectures")
    return True


def unserved(config: dict[str, Any]) -> str | None:
    """Why a causal LM's config cannot be served, where the config says it."""
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder; there is no cross-attention in the engine"
    if "chunked_attention" in (layers := _layer_types(config)) or kind in ("llama4", "llama4_text"):
        return "its layers attend in chunks, which its masks say and its attention is not told"
    others = sorted(layers - _ATTENTION)
    if kind in _STATE_SPACE or others:
        what = f"it has layers of type {', '.join(others)}" if others else f"{kind} is a state-space or hybrid model"
        return f"{what}: they keep a state per sequence, not keys and values"
    if "auto_map" in config and kind is None:
        return "it is made of code of its own (auto_map), which is never run"
    return None


def _layer_types(config: dict[str, Any]) -> set[str]:
    types = config.get("layer_types") or []
    return {str(name) for name in types} if isinstance(types, list) else set()


def chats(model_dir: Path) -> bool:
    """The checkpoint has a chat template: a bare string is a user message then, else a prompt as it is."""
    return read_chat_template(model_dir) is not None


FAMILY = Family(
    name="causal_lm",
    architectures=frozenset(),
    claims=claims,
    graph=graph,
    stages_module="segue.models.causal_lm.stages",
    chats=chats,
    stage_keys=frozenset({"lora", "quantization"}),
    tiny_module="segue.models.causal_lm.tiny",
    tiny_names=TINY,
)
