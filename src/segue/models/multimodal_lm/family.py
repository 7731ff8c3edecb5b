"""Any language model of transformers that sees or hears, as the registry knows it: what no other family names. No torch
here.

What can be told from `config.json` is refused here, before a process is started; the rest when the stages are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.chat_template import read_chat_template
from segue.models.family import Family
from segue.models.multimodal_lm.graph import graph, kinds_of
from segue.models.unserved import unserved

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TINY = ("qwen2.5-vl", "qwen3-vl", "llava-onevision", "gemma3-vision", "qwen2-audio")
"""The families that `segue tiny` knows."""
_SUFFIXES = ("ForConditionalGeneration", "ForCausalLM")
_PREFIX = frozenset(("paligemma",))
_CROSS = frozenset(("mllama", "idefics", "blip"))


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A model with an encoder and a processor. Raises `ConfigError` for one that is known not to be served, with the
    reason."""
    names = config.get("architectures") or []
    if not any(str(name).endswith(_SUFFIXES) for name in names) or not kinds_of(config):
        return False
    if reason := _unserved(config):
        raise ConfigError(f"{names[0]} cannot be served: {reason}", field="architectures")
    if not any((model_dir / name).is_file() for name in PROCESSOR_FILES):
        raise ConfigError(
            f"{names[0]} cannot be served: the checkpoint has no processor ({' or '.join(PROCESSOR_FILES)})",
            field="model",
        )
    return True


def _unserved(config: dict[str, Any]) -> str | None:
    kind, text = config.get("model_type"), config.get("text_config")
    text = text if isinstance(text, dict) else {}
    if kind in _PREFIX:
        return "all tokens of its prompts see each other in both directions, text as well, which is not in the engine"
    if kind in _CROSS:
        return "its decoder looks at pictures by cross-attention, which is not in the engine"
    return unserved(config) or unserved(text)


def chats(model_dir: Path) -> bool:
    """The checkpoint has a chat template: a bare string is a user message then, else a prompt as it is."""
    return read_chat_template(model_dir) is not None


FAMILY = Family(
    name="multimodal_lm",
    architectures=frozenset(),
    claims=claims,
    graph=graph,
    stages_module="segue.models.multimodal_lm.stages",
    chats=chats,
    tiny_module="segue.models.multimodal_lm.tiny",
    tiny_names=TINY,
)
