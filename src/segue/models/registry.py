"""Select the family of a checkpoint by the `architectures` of its config, without importing torch; if no family names
them, the first family that claims the checkpoint.

Other packages register families through the entry-point group `segue.models`: the entry point is a `Family`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, cast

from segue.graph.plugins import plugins
from segue.messages.errors import ConfigError
from segue.models.family import Family, TinyPreset
from segue.models.shared.checkpoint.files import read_object
from segue.models.unserved import SPEAKERS

PIPELINE = "model_index.json"
"""The file that names the parts of a diffusers pipeline, each in its own folder."""


ADAPTER = "adapter_config.json"
"""PEFT's config of a LoRA adapter."""


def families() -> dict[str, Family]:
    """All known families by name: the built-in ones, then those of installed packages."""
    from segue.models.images.flux.family import FAMILY as FLUX
    from segue.models.images.flux2.family import FAMILY as FLUX2
    from segue.models.images.generic_pipeline.family import FAMILY as GENERIC_PIPELINE
    from segue.models.images.qwen_image.family import FAMILY as QWEN_IMAGE
    from segue.models.images.sdxl.family import FAMILY as SDXL
    from segue.models.images.stable_diffusion_3.family import FAMILY as STABLE_DIFFUSION_3
    from segue.models.images.wan.family import FAMILY as WAN
    from segue.models.images.z_image.family import FAMILY as Z_IMAGE
    from segue.models.omni.bagel.family import FAMILY as BAGEL
    from segue.models.omni.multimodal_lm.family import FAMILY as MULTIMODAL_LM
    from segue.models.omni.qwen2_5_omni.family import FAMILY as QWEN2_5_OMNI
    from segue.models.omni.qwen3_omni.family import FAMILY as QWEN3_OMNI
    from segue.models.speech.csm.family import FAMILY as CSM
    from segue.models.speech.higgs_audio_v2.family import FAMILY as HIGGS_AUDIO_V2
    from segue.models.speech.mimo_audio.family import FAMILY as MIMO_AUDIO
    from segue.models.speech.pocket_tts.family import FAMILY as POCKET_TTS
    from segue.models.speech.qwen3_tts.family import FAMILY as QWEN3_TTS
    from segue.models.speech.speech_seq2seq.family import FAMILY as SPEECH_SEQ2SEQ
    from segue.models.text.causal_lm.family import FAMILY as CAUSAL_LM
    from segue.models.text.cross_encoder.family import FAMILY as CROSS_ENCODER
    from segue.models.text.text_classification.family import FAMILY as TEXT_CLASSIFICATION
    from segue.models.text.text_embedding.family import FAMILY as TEXT_EMBEDDING

    named = (
        *(QWEN2_5_OMNI, QWEN3_OMNI, BAGEL, QWEN3_TTS, CSM, HIGGS_AUDIO_V2, POCKET_TTS, MIMO_AUDIO),
        *(QWEN_IMAGE, SDXL, STABLE_DIFFUSION_3, FLUX, FLUX2, Z_IMAGE, WAN),
    )
    generic = (
        *(GENERIC_PIPELINE, TEXT_EMBEDDING, CROSS_ENCODER, TEXT_CLASSIFICATION),
        *(SPEECH_SEQ2SEQ, MULTIMODAL_LM, CAUSAL_LM),
    )
    known = {family.name: family for family in (*named, *generic)}
    known.update((family.name, family) for family in plugins("segue.models", Family))
    return known


def read_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's `config.json`, or the `model_index.json` of a diffusers pipeline, whose `_class_name` becomes
    its `architectures`. Errors name the missing file."""
    if not model_dir.is_dir():
        raise ConfigError(f"no checkpoint at {str(model_dir)!r}: that is not a directory", field="model")
    if (model_dir / PIPELINE).is_file():
        index = read_object(model_dir / PIPELINE)
        return {**index, "architectures": [index["_class_name"]] if "_class_name" in index else []}
    if not (model_dir / "config.json").is_file():
        if (model_dir / ADAPTER).is_file():
            base = read_object(model_dir / ADAPTER).get("base_model_name_or_path")
            raise ConfigError(
                f"{str(model_dir)!r} holds a LoRA adapter and no model: serve its base model "
                f"({base or 'not named in it'}), and pass this directory as --lora NAME=DIR",
                field="model",
            )
        raise ConfigError(
            f"{str(model_dir)!r} holds no config.json and no {PIPELINE}, so it is no checkpoint", field="model"
        )
    return read_object(model_dir / "config.json")


def family_of(config: dict[str, Any], model_dir: Path) -> Family:
    """The family that names one of the config's `architectures`, else the first that claims the checkpoint."""
    wanted = config.get("architectures") or []
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise ConfigError(
            f"{model_dir}: architectures (of a pipeline: _class_name) is {wanted!r}; it must be the name of a class",
            field="architectures",
        )
    known = families()
    for family in known.values():
        if family.architectures & set(wanted):
            return family
    if silent := SPEAKERS & set(wanted):
        raise ConfigError(
            f"no family serves {min(silent)}; of models that speak, served are CSM, Higgs Audio v2, MiMo-Audio, "
            "Pocket TTS, Qwen2.5-Omni, Qwen3-Omni and Qwen3-TTS: docs/models.md",
            field="architectures",
        )
    for family in known.values():
        if family.claims(config, model_dir):
            return family
    if not wanted:
        raise ConfigError(
            f"{model_dir / 'config.json'} names no architectures, so its model class is unknown: add them, e.g. "
            '"architectures": ["LlamaForCausalLM"], as save_pretrained of a model does',
            field="architectures",
        )
    raise ConfigError(
        f"no family serves {', '.join(wanted)}; served are language models (...ForCausalLM), multimodal ones, Whisper, "
        "classifiers (...ForSequenceClassification), text embeddings (with a modules.json), BAGEL, CSM, Higgs Audio "
        "v2, MiMo-Audio, Pocket TTS, Qwen2.5-Omni, Qwen3-Omni, Qwen3-TTS and pipelines of diffusers: docs/models.md",
        field="architectures",
    )


def tiny_preset(name: str) -> TinyPreset:
    """The preset of `segue tiny` with this name. Raises `ConfigError`."""
    known = {name: family for family in families().values() for name in family.tiny_names}
    family = known.get(name)
    if family is None or family.tiny_module is None:
        raise ConfigError(f"there is no tiny preset {name!r}; there are {', '.join(sorted(known))}", field="family")
    return cast(TinyPreset, importlib.import_module(family.tiny_module).PRESETS[name])
