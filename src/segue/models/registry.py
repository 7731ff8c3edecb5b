"""Which family serves a checkpoint: found by `architectures` of its config, without importing torch; what no family
names goes to the first that claims it.

Packages outside register theirs through the entry-point group `segue.models`: the entry point is a `Family`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from segue.messages.errors import ConfigError
from segue.models.family import Family, TinyPreset
from segue.models.json_files import read_object

PIPELINE = "model_index.json"
"""Names the parts of a pipeline of diffusers, each in a folder of its own."""


ADAPTER = "adapter_config.json"
"""PEFT's, of a LoRA adapter."""


def families() -> dict[str, Family]:
    """All known families by name: the house's own, then those of installed packages."""
    from segue.models.causal_lm.family import FAMILY as CAUSAL_LM
    from segue.models.cross_encoder.family import FAMILY as CROSS_ENCODER
    from segue.models.flux.family import FAMILY as FLUX
    from segue.models.flux2.family import FAMILY as FLUX2
    from segue.models.generic_pipeline.family import FAMILY as GENERIC_PIPELINE
    from segue.models.multimodal_lm.family import FAMILY as MULTIMODAL_LM
    from segue.models.qwen2_5_omni.family import FAMILY as QWEN2_5_OMNI
    from segue.models.qwen_image.family import FAMILY as QWEN_IMAGE
    from segue.models.sdxl.family import FAMILY as SDXL
    from segue.models.speech_seq2seq.family import FAMILY as SPEECH_SEQ2SEQ
    from segue.models.stable_diffusion_3.family import FAMILY as STABLE_DIFFUSION_3
    from segue.models.text_classification.family import FAMILY as TEXT_CLASSIFICATION
    from segue.models.text_embedding.family import FAMILY as TEXT_EMBEDDING
    from segue.models.wan.family import FAMILY as WAN
    from segue.models.z_image.family import FAMILY as Z_IMAGE

    named = (QWEN2_5_OMNI, QWEN_IMAGE, SDXL, STABLE_DIFFUSION_3, FLUX, FLUX2, Z_IMAGE, WAN)
    generic = (
        *(GENERIC_PIPELINE, TEXT_EMBEDDING, CROSS_ENCODER, TEXT_CLASSIFICATION),
        *(SPEECH_SEQ2SEQ, MULTIMODAL_LM, CAUSAL_LM),
    )
    known = {family.name: family for family in (*named, *generic)}
    for point in entry_points(group="segue.models"):
        family = _outside(point)
        known[family.name] = family
    return known


def _outside(point: EntryPoint) -> Family:
    """Raises `ConfigError` naming the package."""
    package = "a package" if point.dist is None else f"the package {point.dist.name!r}"
    where = f"the entry point {point.name} = {point.value!r} (segue.models) of {package}"
    try:
        family = point.load()
    except Exception as error:  # what a module of somebody else's raises when it is imported
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(family, Family):
        raise ConfigError(f"{where} is {type(family).__name__}; it must be a segue.models.family.Family")
    return family


def read_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's `config.json`, or the `model_index.json` of a pipeline of diffusers, whose `_class_name` is then
    its `architectures`; errors name what is missing."""
    if not model_dir.is_dir():
        raise ConfigError(f"no checkpoint at {str(model_dir)!r}: that is not a directory", field="model")
    if (model_dir / PIPELINE).is_file():
        index = read_object(model_dir / PIPELINE)
        return {**index, "architectures": [index["_class_name"]] if "_class_name" in index else []}
    if not (model_dir / "config.json").is_file():
        if (model_dir / ADAPTER).is_file():
            base = read_object(model_dir / ADAPTER).get("base_model_name_or_path")
            raise ConfigError(
                f"{str(model_dir)!r} holds a LoRA adapter and no model: serve the model it was made for "
                f"({base or 'not named in it'}), and give this directory as --lora NAME=DIR",
                field="model",
            )
        raise ConfigError(
            f"{str(model_dir)!r} holds no config.json and no {PIPELINE}, so it is no checkpoint", field="model"
        )
    return read_object(model_dir / "config.json")


def family_of(config: dict[str, Any], model_dir: Path) -> Family:
    """The family that serves a checkpoint, by the `architectures` of its config, else by what the family looks for."""
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
    for family in known.values():
        if family.claims(config, model_dir):
            return family
    if not wanted:
        raise ConfigError(
            f"{model_dir / 'config.json'} names no architectures, so what it is of is not known: add them, e.g. "
            '"architectures": ["LlamaForCausalLM"], as save_pretrained of a model does',
            field="architectures",
        )
    raise ConfigError(
        f"no family serves {', '.join(wanted)}; served are language models (...ForCausalLM), those that see or hear, "
        "Whisper, classifiers (...ForSequenceClassification), text embeddings (with a modules.json), Qwen2.5-Omni and "
        "pipelines of diffusers: docs/models.md",
        field="architectures",
    )


def tiny_preset(name: str) -> TinyPreset:
    """The preset `segue tiny` knows by this name. Raises `ConfigError`."""
    known = {name: family for family in families().values() for name in family.tiny_names}
    family = known.get(name)
    if family is None or family.tiny_module is None:
        raise ConfigError(f"there is no tiny preset {name!r}; there are {', '.join(sorted(known))}", field="family")
    return cast(TinyPreset, importlib.import_module(family.tiny_module).PRESETS[name])
