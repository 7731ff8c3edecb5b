"""The stage graph of Pocket TTS; read this first. No torch here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

FIRST = (5, 23)
"""The transformers that is known to have this model; 5.17 does not."""


def has_model(installed: str) -> bool:
    """Whether this version of transformers is known to have the model."""
    major, minor = (int(part) for part in installed.split(".")[:2])
    return (major, minor) >= FIRST


def check_library(installed: str) -> None:
    """Raise `ConfigError` for a version of transformers that lacks the model."""
    if not has_model(installed):
        wanted = ".".join(map(str, FIRST))
        raise ConfigError(
            f"pocket_tts needs transformers {wanted}; {installed} is installed, which may lack it", field="model"
        )


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. The vocoder starts on the backbone's first rows of numbers. Raises
    `ConfigError` if the installed transformers is too old."""
    check_library(version("transformers"))
    g = StageGraph("pocket_tts")
    g.stage("backbone", "autoregressive", takes={"text"}, without={"lora", "speculation"})
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("backbone", "vocoder")  # a chunk per step of the backbone
    return g
