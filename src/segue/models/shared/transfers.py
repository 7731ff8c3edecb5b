"""Edge transfers that do not belong to one family."""

from __future__ import annotations

from segue.engines.contract import Payload, StageOutput, StageRequest


def whole(request: StageRequest, output: StageOutput) -> Payload | None:
    """Send the whole payload."""
    return output.payload
