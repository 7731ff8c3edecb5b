"""The model families of `segue bench omni`: their presets, and how much speech a reply has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.registry import family_of


@dataclass(frozen=True, slots=True)
class Suppressed:
    """Token ids that no side may generate."""

    thinker: tuple[int, ...]
    talker: tuple[int, ...]
    talker_ends: tuple[int, ...]
    """The talker's end tokens, which are also in `talker`."""


@dataclass(frozen=True)
class OmniFamily:
    """What the benchmark must know of a model family."""

    preset: str
    """Name of its tiny preset."""
    codes_per_token: int
    """Codes, or rows of codes, per token of the reply."""
    unspoken_codes: int
    """Codes that the talker must make after those that become audio, if a length and not an end token stops it."""
    suppressed: Callable[[Mapping[str, Any]], Suppressed]
    """From a checkpoint's `config.json`."""
    reference: str
    """The module whose `Reference` runs it with `transformers`."""


def _suppressed_2_5(config: Mapping[str, Any]) -> Suppressed:
    thinker, talker = config["thinker_config"], config["talker_config"]
    media = [thinker[f"{kind}_token_index"] for kind in ("image", "audio", "video")]
    media += [thinker["vision_start_token_id"], thinker["audio_start_token_id"]]
    named = thinker["text_config"].get("eos_token_id", thinker.get("eos_token_id"))
    ends = [] if named is None else named if isinstance(named, list) else [named]
    talker_ends = (talker["tts_codec_pad_token_id"], talker["tts_codec_end_token_id"])
    embedded = config["token2wav_config"]["dit_config"]["num_embeds"]
    unheard = range(embedded, talker["vocab_size"])
    return Suppressed(tuple(sorted({*media, *ends})), tuple(sorted({*unheard, *talker_ends})), talker_ends)


def _suppressed_3(config: Mapping[str, Any]) -> Suppressed:
    thinker, talker = config["thinker_config"], config["talker_config"]
    media = [thinker[f"{kind}_token_id"] for kind in ("image", "audio", "video")]
    media += [thinker["vision_start_token_id"], thinker["audio_start_token_id"]]
    end = talker["codec_eos_token_id"]
    unheard = range(config["code2wav_config"]["codebook_size"], talker["text_config"]["vocab_size"])
    return Suppressed(tuple(sorted({*media, config["im_end_token_id"]})), tuple(sorted({*unheard, end})), (end,))


FAMILIES = {
    "qwen2_5_omni": OmniFamily(
        preset="qwen2.5-omni",
        codes_per_token=4,  # 80 ms of speech: 5 s on average
        unspoken_codes=0,
        suppressed=_suppressed_2_5,
        reference="segue.bench.omni.library.qwen2_5_omni",
    ),
    "qwen3_omni": OmniFamily(
        preset="qwen3-omni",
        codes_per_token=2,  # 160 ms of speech: 10 s on average
        unspoken_codes=1,  # its first code begins a row, which the next step completes
        suppressed=_suppressed_3,
        reference="segue.bench.omni.library.qwen3_omni",
    ),
}
"""By the name in Segue's registry."""
PRESETS = tuple(family.preset for family in FAMILIES.values())


def omni_family(config: dict[str, Any], model_dir: Path) -> OmniFamily:
    """The family of a checkpoint. Raises `ConfigError` for others."""
    name = family_of(config, model_dir).name
    if name not in FAMILIES:
        raise ConfigError(f"{model_dir}: segue bench omni knows {', '.join(PRESETS)}, not {name}", field="model")
    return FAMILIES[name]
