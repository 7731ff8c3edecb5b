"""What this family takes from diffusers besides `segue.models.diffusion.library`, which has to be imported first."""

# ruff: noqa: I001
from segue.models.diffusion.library import LIBRARIES

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
    "ConditionalPipelineBlocks",
    "DiffusionPipeline",
    "LoopSequentialPipelineBlocks",
    "ModularPipeline",
    "ModularPipelineBlocks",
    "PipelineState",
    "SequentialPipelineBlocks",
]
