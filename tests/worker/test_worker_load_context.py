"""What of a deployment does not go with the device of a stage is named before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segue.graph.kinds.diffusion import DiffusionPlan
from segue.messages.errors import ConfigError
from segue.messages.process import WorkerSpec
from segue.worker.process.ranks import load_context


def spec(directory: Path) -> WorkerSpec:
    return WorkerSpec(
        worker="denoiser.0-1",
        replica=0,
        family="qwen_image",
        model_dir=str(directory),
        stages=[],
        edges=[],
        replayable=[],
        limits={},
        inbox="",
        orchestrator="",
        connector="",
    )


def plan(**keys: Any) -> DiffusionPlan:
    given: dict[str, Any] = {
        "devices": ("cpu",), "replicas": 1, "memory_share": 0.0, "memory_bytes": 0, "dtype": "float32", "threads": 1,
        "max_batch": 4,
    }  # fmt: skip
    return DiffusionPlan("denoiser", "diffusion", **{**given, **keys})


def test_weights_do_not_wait_where_they_are_computed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offload is 'layerwise', but the stage runs on the CPU") as no:
        load_context(spec(tmp_path), plan(offload="layerwise"))
    assert no.value.field == "stages.denoiser.offload"


def test_a_plan_becomes_what_an_adapter_is_built_with(tmp_path: Path) -> None:
    made = load_context(spec(tmp_path), plan(dtype="bfloat16", compile=True))
    assert (made.model_dir, made.stage, str(made.device), str(made.dtype)) == (
        tmp_path, "denoiser", "cpu", "torch.bfloat16",
    )  # fmt: skip
    assert made.compile
    assert not made.fused, "compiled GEMMs are fused by the compiler"
