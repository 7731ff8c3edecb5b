"""`segue bench steps`: every side on a tiny shape on the CPU, its file, its report, and what it counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from segue.bench.main import main
from segue.bench.steps.results import work_of
from segue.models.text.causal_lm.shapes import SHAPES, write_shape

pytestmark = pytest.mark.slow

SMALL = ["--device", "cpu", "--dtype", "float32", "--batches", "1,2", "--prompt", "24", "--output", "4"]


def bench(tmp_path: Path, *more: str) -> int:
    small = [*SMALL, "--prefills", "40", "--repeats", "1", "--cache", str(tmp_path), "--out", str(tmp_path)]
    return main(["steps", *small, *more])


@pytest.mark.parametrize("shape", ["tiny", pytest.param("tiny-moe", marks=pytest.mark.nightly)])
def test_every_side_is_measured(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = "segue,static,continuous" if shape == "tiny" else "segue,static"
    assert bench(tmp_path, "--shape", shape, "--sides", sides) == 0
    result = json.loads((tmp_path / f"steps-shape-{shape}.json").read_text())
    assert result["done"] == result["planned"]
    assert {(one["side"], one["batch"]) for one in result["decodes"]} == {
        (side, batch) for side in result["startup"] for batch in (1, 2)
    }
    assert all(one["step"] > 0 and one["bound"] > 0 and one["flops"] > 0 for one in result["decodes"])
    assert all(one["seconds"] > 0 for one in result["prefills"])
    assert (tmp_path / f"steps-shape-{shape}.png").stat().st_size > 1000
    assert "| segue | 2 |" in capsys.readouterr().out


def test_a_profile(tmp_path: Path) -> None:
    assert bench(tmp_path, "--shape", "tiny", "--sides", "segue", "--profile", "2") == 0
    result = json.loads((tmp_path / "steps-shape-tiny.json").read_text())
    [one] = result["profiles"]
    assert 0 < one["busy"] < one["step"]
    assert one["kernels"] >= sum(calls for _, calls, _ in one["longest"]) > 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_compiled_layers(tmp_path: Path) -> None:
    assert bench(tmp_path, "--shape", "tiny", "--sides", "segue-compiled", "--profile", "1") == 0
    result = json.loads((tmp_path / "steps-shape-tiny.json").read_text())
    assert {one["side"] for one in [*result["decodes"], *result["profiles"]]} == {"segue, compiled layers"}


def test_what_fails_is_kept_and_the_rest_is_measured(tmp_path: Path) -> None:
    config = write_shape(tmp_path, "tiny") / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "max_position_embeddings": 30}))
    assert bench(tmp_path, "--model", str(config.parent), "--sides", "segue") == 1
    result = json.loads((tmp_path / "steps-shape-tiny.json").read_text())
    assert len(result["failures"]) == result["planned"] == 3
    assert all("max_model_len is 41" in said for said in result["failures"].values())


def test_weights_and_operations_are_counted(tmp_path: Path) -> None:
    work = work_of(write_shape(tmp_path, "qwen2.5-7b"), 2)
    shape = SHAPES["qwen2.5-7b"]
    assert work.dense + 2 * work.head == pytest.approx(7.615e9, rel=1e-3)  # with the table; published: 7.61 billion
    assert work.cached == 2 * 28 * 4 * 128
    assert work.decode_bytes(1, 0) == 2 * (work.dense + work.head)
    assert work.decode_bytes(3, 10) - work.decode_bytes(3, 0) == 2 * 3 * 10 * work.cached
    assert work.decode_flops(2, 100) == 4 * (work.dense + work.head) + 8 * 100 * work.attention
    assert work.attention == shape["num_hidden_layers"] * shape["hidden_size"]
    sparse = work_of(write_shape(tmp_path, "qwen3-30b-a3b"), 2)
    assert sparse.dense + sparse.experts + 2 * sparse.head == pytest.approx(30.53e9, rel=1e-3)
    assert sparse.decode_bytes(1, 0) == pytest.approx(2 * (sparse.dense + sparse.head + sparse.experts / 16), rel=1e-6)
    assert sparse.decode_bytes(10**6, 0) == pytest.approx(2 * (sparse.dense + sparse.head + sparse.experts), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    options = ["--device", "cuda:0", "--dtype", "bfloat16", "--shape", "tiny-moe", "--batches", "1,2"]
    assert bench(tmp_path, *options, "--sides", "segue,static") == 0
    result = json.loads((tmp_path / "steps-shape-tiny-moe.json").read_text())
    assert all(one["recorded"] > 0.5 for one in result["decodes"] if one["side"] == "segue")
