"""Presets of benchmarks with weights as they are published."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from segue.bench.harness.checkpoint import keep_in_bfloat16


def test_weights_are_rounded_wherever_they_lie(tmp_path: Path) -> None:
    weights = {"weight": torch.randn(4, 6), "steps": torch.arange(3)}
    for name in ("transformer", "vae"):
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
    keep_in_bfloat16(tmp_path)
    for name in ("transformer", "vae"):
        kept = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(kept["weight"], weights["weight"].bfloat16())
        assert torch.equal(kept["steps"], weights["steps"])
