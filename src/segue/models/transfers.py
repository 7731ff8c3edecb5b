"""What leaves over an edge, where that is not a family's own."""

from __future__ import annotations

from segue.engines.contract import Payload, StageOutput, StageRequest


def whole(request: StageRequest, output: StageOutput) -> Payload | None:
    """All of the payload."""
    return output.payload
