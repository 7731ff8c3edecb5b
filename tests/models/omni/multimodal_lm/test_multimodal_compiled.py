"""The language half of a model that sees, with compiled layers (`compile: true`), gives the library's replies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from multimodal_family import Run, Stages, answer, cases_of, processed
from torch._dynamo.utils import counters

from segue.kernels.graphs.compiled import compile_layers
from segue.models.omni.multimodal_lm.tiny import presets as tiny


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "gemma3-vision", "llava-onevision"])
def test_replies_of_compiled_layers(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In chunks and in one batch, with M-RoPE, deep features and bidirectional spans; then from the prefix cache."""
    torch.compiler.reset()  # what other models of this process have compiled counts against a limit of variants
    counters.clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    directory, cases = tmp_path / "model", cases_of(family)
    tiny.make(family, directory)
    expected = {case.name: answer(directory, processed(directory, case)) for case in cases}
    stages = Stages(directory, fused=False)
    assert compile_layers(stages.llm.library_decoder, "cpu") > 1
    run = Run(stages, max_tokens_per_step=64, enforce_eager=True)
    for _ in range(2):
        assert run(cases) == expected
    assert counters["stats"]["unique_graphs"], "something was compiled"
