"""The stage graph of a pipeline that no family names: one stage that calls the library. No torch here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

STAGE = "library_pipeline"
_VIDEO = re.compile(
    r"Video|AnimateDiff|Allegro|CogVideo|ConsisID|Cosmos|EasyAnimate|Latte|^LTX|Mochi|SkyReels|^Wan|Hunyuan.*Framepack"
)
"""Pipelines whose output is frames: a class says so only once diffusers is imported."""
_SOUND = re.compile(r"Audio|Music|Sound|AceStep|^LTX2")


def graph(config: dict[str, Any]) -> StageGraph:
    """From its `model_index.json`."""
    video = _VIDEO.search(str(config.get("_class_name"))) is not None
    g = StageGraph("generic_pipeline")
    g.stage(STAGE, "module", takes={"text", "image"}, gives={"video" if video else "image"})
    return g


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A pipeline of diffusers. Raises `ConfigError` for one that makes sound."""
    kind = config.get("_class_name")
    if not isinstance(kind, str) or "_diffusers_version" not in config:
        return False
    if _SOUND.search(kind):
        raise ConfigError(f"{kind} makes sound, which is not served of diffusers' pipelines", field="model")
    return True
