"""Any language model of transformers that sees or hears, as the registry knows it: what no other family names. No torch
here.

What can be told from `config.json` is refused here, before a process is started; the rest when the stages are loaded.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.chat_template import chats
from segue.models.family import Family
from segue.models.multimodal_lm.graph import graph, kinds_of
from segue.models.unserved import ENCODER_DECODER, unserved

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TINY = ("qwen2.5-vl", "qwen3-vl", "llava-onevision", "gemma3-vision", "llama3.2-vision", "qwen2-audio")
"""The families that `segue tiny` knows."""
_SUFFIXES = ("ForConditionalGeneration", "ForCausalLM", "NemotronH_Omni_Reasoning_V3")
_CROSS = "its decoder looks at media by cross-attention, which is not in the engine"
_CODES = "pictures are tokens of its vocabulary, made by an autoencoder, and not rows in the places of tokens"
_BESIDE = "it takes a row of sound along with every token it writes, which is not in the engine"
_ADAPTER = "its language model has other weights (an adapter) for prompts with sound than for those without"
_REASONS = MappingProxyType(
    {
        **dict.fromkeys(("idefics", "blip", "evolla"), _CROSS),
        **dict.fromkeys(("chameleon", "emu3"), _CODES),
        **dict.fromkeys(("kyutai_speech_to_text", "voxtral_realtime"), _BESIDE),
        **dict.fromkeys(("granite_speech", "granite_speech_plus"), _ADAPTER),
        **dict.fromkeys(("t5gemma2", "udop", "vision-encoder-decoder"), ENCODER_DECODER),
        "nemotron_h_omni": "its decoder is a hybrid (nemotron_h), whose layers keep a state per sequence",
        "fuyu": "its patches have no encoder and are told apart by an index of their own",
        "vibevoice_asr": "noise is drawn for what it hears, so that a recording has no rows of its own",
        "diffusion_gemma": "it writes blocks of text by denoising them, not token by token",
        "pi0": "it gives actions of a robot, not text",
        "qwen3_omni_moe": "it speaks, for which it would need a family of its own (talker, code predictor, vocoder)",
    }
)
"""By model type, why it is not served, where its config does not say."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A model with an encoder and a processor. Raises `ConfigError` for one that is known not to be served, with the
    reason."""
    names = config.get("architectures") or []
    if names and (reason := _REASONS.get(str(config.get("model_type")))):
        raise ConfigError(f"{names[0]} cannot be served: {reason}", field="architectures")
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
    text = config.get("text_config")
    return unserved(config) or unserved(text if isinstance(text, dict) else {})


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
