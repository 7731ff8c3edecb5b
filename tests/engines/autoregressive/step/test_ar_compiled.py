"""A decoder whose layers are compiled gives the library's tokens, in every shape of a step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, generate, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.kernels.graphs.compiled import compile_layers, repeated_layers
from segue.kernels.linear.linear import PackedLinear, pack_linears
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(3, (3, 17, 30))
TOKENS = 8


def test_the_layers_of_a_decoder_are_found() -> None:
    model = tiny_model("qwen2")
    assert repeated_layers(model) == list(model.model.layers)
    assert repeated_layers(torch.nn.Linear(2, 2)) == []


def test_without_a_compiler_it_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compile_layers(tiny_model("qwen2"), "cpu") == 0
    assert "no C++ compiler" in caplog.text


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_tokens_of_compiled_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = tiny_model("qwen2", num_hidden_layers=2)
    expected = [generate(model, prompt, TOKENS) for prompt in PROMPTS]
    assert pack_linears(model, 8) > 0
    adapter = TinyAdapter(model)
    assert compile_layers(model.model, "cpu") == 2
    engine = AutoregressiveEngine(adapter, AutoregressiveConfig(num_blocks=64, block_size=8, max_tokens_per_step=16))
    drive = Driver(engine)
    for index, prompt in enumerate(PROMPTS):
        drive.add(
            stage_request(f"r{index}", sampling=SamplingParams(temperature=0.0, max_tokens=TOKENS + index)), prompt
        )
    results = drive.run()
    assert [results[f"r{index}"].token_ids[:TOKENS] for index in range(len(PROMPTS))] == expected
    assert any(path.suffix == ".so" for path in tmp_path.rglob("*")), "something was compiled"


def test_the_packed_product_as_an_operator() -> None:
    linear = torch.nn.Linear(24, 40)
    packed = PackedLinear(linear, 8)
    x = torch.randn(3, 24)
    ours = torch.ops.segue.packed_linear(x, packed.weight, packed.bias, 40)
    torch.testing.assert_close(ours, linear(x))
