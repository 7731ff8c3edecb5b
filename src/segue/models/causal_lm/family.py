"""Any causal language model of transformers, as the registry knows it: what no other family names. No torch here.

What can be told from `config.json` is refused here, before a process is started; the worker compares with the library
itself (`segue.models.decoder`, `segue.engines.autoregressive.check`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.causal_lm.graph import graph
from segue.models.chat_template import chats
from segue.models.family import Family
from segue.models.unserved import unserved

_SUFFIXES = ("ForCausalLM", "LMHeadModel")
TINY = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma3", "phi3", "gpt-oss", "olmo", "gpt2")
"""The families that `segue tiny` knows."""
_OTHER_SENSES = ("vision_config", "audio_config")


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A causal LM without encoders. Raises `ConfigError` for one that is known not to be served, with the reason."""
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
    stages_module="segue.models.causal_lm.stages",
    chats=chats,
    stage_keys=frozenset({"lora", "quantization"}),
    tiny_module="segue.models.causal_lm.tiny",
    tiny_names=TINY,
)
