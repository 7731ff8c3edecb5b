"""Segue: any-to-any models, served as graphs of stages that stream into each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue.messages.sampling import RepetitionDetection, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from segue.models.model_graph import ModelGraph
    from segue.orchestrator.omni.async_omni import AsyncOmni
    from segue.orchestrator.omni.blocking import Omni

__all__ = ["AsyncOmni", "ModelGraph", "Omni", "RepetitionDetection", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    # `import segue` stays light: the orchestrator brings asyncio, ZeroMQ and the model registry
    if name == "Omni":
        from segue.orchestrator.omni.blocking import Omni

        return Omni
    if name == "AsyncOmni":
        from segue.orchestrator.omni.async_omni import AsyncOmni

        return AsyncOmni
    if name == "ModelGraph":
        from segue.models.model_graph import ModelGraph

        return ModelGraph
    raise AttributeError(f"module 'segue' has no attribute {name!r}")
