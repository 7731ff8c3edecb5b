"""What may be asked for: bounds on what is made, from the deployment's `limits`."""

from __future__ import annotations

from dataclasses import dataclass

from segue.engines.contract import LoadContext


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Bounds of one request; the defaults are those of `segue.graph.deployment.Limits`."""

    max_output_pixels: int = 4_194_304
    """Height times width of a picture or frame."""
    max_inference_steps: int = 200
    max_output_frames: int = 257
    max_outputs: int = 10

    @classmethod
    def of(cls, ctx: LoadContext) -> OutputLimits:
        """Those the worker hands to the input stage."""
        return cls(**ctx.options.get("output_limits", {}))
