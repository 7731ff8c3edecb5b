"""Families whose requests go through an input stage and one more: what their tests share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from segue.engines.contract import LoadContext, StageOutput, StageRequest
from segue.engines.module.contract import ModuleModel
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.shared.input_stage import InputStage


def context(directory: Path, stage: str, **more: Any) -> LoadContext:
    return LoadContext(directory, stage, torch.device("cpu"), torch.float32, **more)


def edit(path: Path, **values: Any) -> None:
    """Keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def answered(inputs: InputStage, adapter: ModuleModel, requests: Sequence[Request]) -> list[StageOutput]:
    """The requests, of several ids and one modality, through both stages, in calls of up to four."""
    engine = ModuleEngine(adapter, ModuleConfig(max_batch=4))
    for request in requests:
        gives = frozenset(request.modalities)
        engine.add(
            StageRequest(
                request.request_id,
                "answers",
                request,
                FALLBACK,
                seed=0,
                upstreams=frozenset({"input"}),
                downstreams=frozenset(),
                to_client=gives,
            )
        )
        engine.feed(request.request_id, "input", inputs.process(request), final=True)
    found: dict[str, StageOutput] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.finished
            found[output.request_id] = output
    assert engine.stats()["calls_total"] < len(requests) or len(requests) == 1, "some share a call"
    return [found[request.request_id] for request in requests]
