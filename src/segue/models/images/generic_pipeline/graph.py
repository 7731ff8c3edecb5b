"""The stage graph of a pipeline that no other family claims: stages of diffusers' modular blocks, else one stage that
calls the library's whole pipeline. No torch here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import INPUT, StageGraph
from segue.media.parts import IMAGES
from segue.messages.errors import ConfigError
from segue.models.images.generic_pipeline.call import arguments_of
from segue.models.images.generic_pipeline.splits import (
    DECODER_STAGE,
    DENOISER_STAGE,
    IMAGE_STAGE,
    TEXT_STAGE,
    Split,
    split_of,
)

STAGE = "library_pipeline"
_VIDEO = re.compile(
    r"Video|AnimateDiff|Allegro|CogVideo|ConsisID|Cosmos|EasyAnimate|Latte|^LTX|Mochi|SkyReels|^Wan|Hunyuan.*Framepack"
)
"""Pipelines that output frames: their classes show it only after importing diffusers."""
_AUDIO = re.compile(r"Audio|Music|Sound|AceStep|^LTX2")


def graph(config: dict[str, Any]) -> StageGraph:
    """The stages of a checkpoint, from its `model_index.json`."""
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
    """Input modalities of a pipeline called as a whole, from its call's arguments; if these are unknown, the input
    stage refuses unsupported inputs later."""
    arguments = arguments_of(kind)
    return {"text", "image"} if arguments is None or arguments & IMAGES else {"text"}


def _draw(g: StageGraph, split: Split, gives: set[str]) -> None:
    runs = {stage: f"{split.kind}: {', '.join(blocks)}" for stage, blocks in split.stages.items()}
    g.stage(TEXT_STAGE, "module", takes={"text"}, library=runs[TEXT_STAGE])
    if split.images:  # for requests with an input image
        g.stage(IMAGE_STAGE, "module", takes={"image"}, fuse_with=DECODER_STAGE, library=runs[IMAGE_STAGE])
    g.stage(DENOISER_STAGE, "module", library=runs[DENOISER_STAGE])
    g.stage(DECODER_STAGE, "module", gives=gives, library=runs[DECODER_STAGE])
    g.edge(INPUT, DENOISER_STAGE)  # the pipeline's arguments
    g.edge(INPUT, DECODER_STAGE)
    g.edge(TEXT_STAGE, DENOISER_STAGE)  # the pipeline state that the blocks leave
    if split.images:
        g.edge(IMAGE_STAGE, DENOISER_STAGE)
    g.edge(DENOISER_STAGE, DECODER_STAGE)


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """Whether this is a diffusers pipeline. Raises `ConfigError` for one that generates audio."""
    kind = config.get("_class_name")
    if not isinstance(kind, str) or "_diffusers_version" not in config:
        return False
    if _AUDIO.search(kind):
        raise ConfigError(f"{kind} generates audio, which is not supported for diffusers' pipelines", field="model")
    return True
