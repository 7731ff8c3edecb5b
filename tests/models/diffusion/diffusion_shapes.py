"""Published shapes without their weights: denoisers on the meta device, one call over rows of two requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from segue.engines.contract import StageRequest
from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser

META = torch.device("meta")


def write_configs(directory: Path, index: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> None:
    """A checkpoint of configs alone: `parts` by folder."""
    (directory / "model_index.json").write_text(json.dumps(index))
    for name, config in parts.items():
        (directory / name).mkdir()
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (directory / name / file).write_text(json.dumps(config))


def on_meta(kind: type[Denoiser], directory: Path) -> Denoiser:
    """A family's denoiser, its network built and given no memory."""
    return kind(DenoiserContext(directory, "denoiser", META, torch.bfloat16, load_format="dummy"))


def samples(
    denoiser: Denoiser, name: str, params: DiffusionParams, inputs: Mapping[str, Mapping[str, Any]]
) -> list[Sample]:
    """Of one request; `inputs`: payloads by upstream, besides the settings."""
    upstreams = frozenset(("input", *inputs))
    request = StageRequest(
        name, "denoiser", Request(request_id=name), FALLBACK, 0, upstreams, frozenset(("decoder",)), frozenset()
    )
    state = denoiser.begin(request)
    made: list[Sample] = []
    for upstream, payload in {"input": {"settings": msgspec.to_builtins(params)}, **inputs}.items():
        made += denoiser.feed(state, upstream, dict(payload), final=True)
    return made


def call(denoiser: Denoiser, chosen: list[Sample]) -> list[torch.Tensor]:
    """What the network predicts for all branches of these samples, in one call."""
    assert len({denoiser.bucket(sample) for sample in chosen}) == 1
    rows = [Row(sample, branch) for sample in chosen for branch in denoiser.branches(sample)]
    with torch.inference_mode():
        return list(denoiser.predict(rows))


def parameters(denoiser: Denoiser) -> float:
    """Of the network, in billions."""
    return sum(parameter.numel() for parameter in denoiser.network.parameters()) / 1e9
