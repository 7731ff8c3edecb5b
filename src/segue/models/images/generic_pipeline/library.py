"""The further parts of diffusers that this family uses; `segue.models.shared.diffusion.library` must be imported
first."""

# ruff: noqa: I001
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from segue.models.shared.diffusion.library import LIBRARIES

from diffusers import DiffusionPipeline
from diffusers.guiders import BaseGuidance
from diffusers.modular_pipelines import (
    ConditionalPipelineBlocks,
    LoopSequentialPipelineBlocks,
    ModularPipeline,
    ModularPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
)

__all__ = [
    "LIBRARIES",
    "BaseGuidance",
    "ChecksInputs",
    "ConditionalPipelineBlocks",
    "DiffusionPipeline",
    "LoopSequentialPipelineBlocks",
    "ModularPipeline",
    "ModularPipelineBlocks",
    "PipelineState",
    "SequentialPipelineBlocks",
    "default_blocks",
    "modular_kind",
]


def modular_kind(name: str) -> type[ModularPipeline]:
    """diffusers' modular pipeline class of a name in `splits`."""
    found = getattr(LIBRARIES["diffusers"], name)
    assert issubclass(found, ModularPipeline)
    return found


def default_blocks(name: str) -> Mapping[str, ModularPipelineBlocks]:
    """All blocks of a modular pipeline, by name, in execution order."""
    found: Mapping[str, ModularPipelineBlocks] = getattr(
        LIBRARIES["diffusers"], modular_kind(name).default_blocks_name
    )().sub_blocks
    return found


@runtime_checkable
class ChecksInputs(Protocol):
    """A pipeline that checks its arguments; not all do."""

    @property
    def check_inputs(self) -> Callable[..., None]: ...
