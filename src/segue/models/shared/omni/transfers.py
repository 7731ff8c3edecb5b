"""Transfers from the input stage of an omni model."""

from __future__ import annotations

from segue.engines.contract import Payload, StageOutput, StageRequest

_TENSORS = ("pixel_values", "input_features")


def media_tensors(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the media tensors."""
    if output.payload is None:
        return None
    return {"media": output.payload["media"]}


def prompt_facts(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → thinker: everything except the media tensors."""
    if output.payload is None:
        return None
    media = []
    for item in output.payload["media"]:
        facts = {key: value for key, value in item.items() if key not in _TENSORS}
        if "input_features" in item:
            facts["frames"] = item["input_features"].shape[1]
        media.append(facts)
    return {**output.payload, "media": media}
