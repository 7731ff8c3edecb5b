"""The stage graph of a pipeline that no family names: stages of diffusers' modular blocks, else one that calls the
library's pipeline whole. No torch here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import INPUT, StageGraph
from segue.media.pictures import PICTURES
from segue.messages.errors import ConfigError
from segue.models.generic_pipeline.call import arguments_of
from segue.models.generic_pipeline.splits import (
    DECODER_STAGE,
    DENOISER_STAGE,
    PICTURE_STAGE,
    TEXT_STAGE,
    Split,
    split_of,
)

STAGE = "library_pipeline"
_VIDEO = re.compile(
    r"Video|AnimateDiff|Allegro|CogVideo|ConsisID|Cosmos|EasyAnimate|Latte|^LTX|Mochi|SkyReels|^Wan|Hunyuan.*Framepack"
)
"""Pipelines whose output is frames: a class says so only once diffusers is imported."""
_SOUND = re.compile(r"Audio|Music|Sound|AceStep|^LTX2")


def graph(config: dict[str, Any]) -> StageGraph:
    """From its `model_index.json`."""
    kind = str(config.get("_class_name"))
    gives = {"video" if _VIDEO.search(kind) is not None else "image"}
    g = StageGraph("generic_pipeline")
    split = split_of(config)
    if split is None:
        g.stage(STAGE, "module", takes=_takes(kind), gives=gives, library=f"diffusers' {kind}, whole")
    else:
        _draw(g, split, gives)
    return g


def _takes(kind: str) -> set[str]:
    """Of a pipeline that is called whole, as its call has it; where that is not known, its input stage says later what
    is too much."""
    arguments = arguments_of(kind)
    return {"text", "image"} if arguments is None or arguments & PICTURES else {"text"}


def _draw(g: StageGraph, split: Split, gives: set[str]) -> None:
    runs = {stage: f"{split.kind}: {', '.join(blocks)}" for stage, blocks in split.stages.items()}
    g.stage(TEXT_STAGE, "module", takes={"text"}, library=runs[TEXT_STAGE])
    if split.pictures:  # for requests that bring one
        g.stage(PICTURE_STAGE, "module", takes={"image"}, fuse_with=DECODER_STAGE, library=runs[PICTURE_STAGE])
    g.stage(DENOISER_STAGE, "module", library=runs[DENOISER_STAGE])
    g.stage(DECODER_STAGE, "module", gives=gives, library=runs[DECODER_STAGE])
    g.edge(INPUT, DENOISER_STAGE)  # the arguments
    g.edge(INPUT, DECODER_STAGE)
    g.edge(TEXT_STAGE, DENOISER_STAGE)  # what the blocks left in the pipeline's state
    if split.pictures:
        g.edge(PICTURE_STAGE, DENOISER_STAGE)
    g.edge(DENOISER_STAGE, DECODER_STAGE)


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """A pipeline of diffusers. Raises `ConfigError` for one that makes sound."""
    kind = config.get("_class_name")
    if not isinstance(kind, str) or "_diffusers_version" not in config:
        return False
    if _SOUND.search(kind):
        raise ConfigError(f"{kind} makes sound, which is not served of diffusers' pipelines", field="model")
    return True
