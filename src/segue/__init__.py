"""Segue: any-to-any models, served as graphs of stages that stream into each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue.messages.sampling import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from segue.orchestrator.omni import AsyncOmni, Omni

__all__ = ["AsyncOmni", "Omni", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    # `import segue` stays light: the orchestrator brings asyncio, ZeroMQ and the model registry
    if name in {"Omni", "AsyncOmni"}:
        from segue.orchestrator import omni

        return getattr(omni, name)
    raise AttributeError(f"module 'segue' has no attribute {name!r}")
