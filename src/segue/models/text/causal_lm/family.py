"""Registers causal language models of transformers that no other family claims. No torch here.

Models that `config.json` shows to be unsupported are refused here, before a process starts; the worker also compares
the loaded model with the library (`segue.models.shared.decoder.decoder`, `segue.engines.autoregressive.step.check`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.family import Family
from segue.models.shared.text.chat_template import chats
from segue.models.text.causal_lm.graph import graph
from segue.models.unserved import unserved

_SUFFIXES = ("ForCausalLM", "LMHeadModel")
TINY = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma3", "phi3", "gpt-oss", "olmo", "gpt2")
"""The families that `segue tiny` can make."""
_OTHER_SENSES = ("vision_config", "audio_config")


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """Whether this is a causal LM without encoders. Raises `ConfigError` with the reason if it is known to be
    unsupported."""
    names = config.get("architectures") or []
    if not any(str(name).endswith(_SUFFIXES) for name in names) or any(key in config for key in _OTHER_SENSES):
        return False
    if reason := unserved(config):
        raise ConfigError(f"{names[0]} cannot be served: {reason}", field="architectures")
    return True


FAMILY = Family(
    name="causal_lm",
    architectures=frozenset(),
    claims=claims,
    graph=graph,
    skips_tokenizer=True,
    stages_module="segue.models.text.causal_lm.stages",
    reference_module="segue.models.text.causal_lm.reference",
    chats=chats,
    appends=True,
    goes_on=True,
    stage_keys=frozenset({"lora", "quantization"}),
    tiny_module="segue.models.text.causal_lm.tiny",
    tiny_names=TINY,
)
