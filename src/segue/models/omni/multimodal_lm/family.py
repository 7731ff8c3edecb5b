"""Registers language models of transformers with image, video or audio inputs that no other family claims. No torch
here.

Models that `config.json` shows to be unsupported are refused here, before a process starts; the others when the stages
load.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.family import Family
from segue.models.omni.multimodal_lm.graph import graph, kinds_of
from segue.models.shared.text.chat_template import chats
from segue.models.unserved import ENCODER_DECODER, unserved

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TINY = ("qwen2.5-vl", "qwen3-vl", "llava-onevision", "gemma3-vision", "llama3.2-vision", "qwen2-audio")
"""The families that `segue tiny` can make."""
_SUFFIXES = ("ForConditionalGeneration", "ForCausalLM", "NemotronH_Omni_Reasoning_V3")
_CROSS = "its decoder attends to media by cross-attention, which the engine does not support"
_CODES = "images are tokens of its vocabulary, made by an autoencoder, not encoder rows"
_AUDIO_ROWS = "it takes an audio row along with every generated token, which the engine does not support"
_ADAPTER = "its language model has other weights (a LoRA adapter) for prompts with audio than for those without"
_REASONS = MappingProxyType(
    {
        **dict.fromkeys(("idefics", "blip", "evolla"), _CROSS),
        **dict.fromkeys(("chameleon", "emu3"), _CODES),
        **dict.fromkeys(("kyutai_speech_to_text", "voxtral_realtime"), _AUDIO_ROWS),
        **dict.fromkeys(("granite_speech", "granite_speech_plus"), _ADAPTER),
        **dict.fromkeys(("t5gemma2", "udop", "vision-encoder-decoder"), ENCODER_DECODER),
        "nemotron_h_omni": "its decoder is a hybrid (nemotron_h), whose layers keep a state per sequence",
        "fuyu": "its patches have no encoder and are told apart by an index of their own",
        "vibevoice_asr": "its audio encoder draws noise, so that a recording has no fixed rows",
        "diffusion_gemma": "it generates blocks of text by denoising, not token by token",
        "pi0": "it outputs robot actions, not text",
    }
)
"""By model type, why it is unsupported, if its config does not show it."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """Whether the model has an encoder and a processor. Raises `ConfigError` with the reason if it is known to be
    unsupported."""
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
    stages_module="segue.models.omni.multimodal_lm.stages",
    reference_module="segue.models.omni.multimodal_lm.reference",
    chats=chats,
    goes_on=True,
    stage_keys=frozenset({"lora", "quantization"}),
    tiny_module="segue.models.omni.multimodal_lm.tiny.presets",
    tiny_names=TINY,
)
