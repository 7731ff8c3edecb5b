"""`segue bench denoise`: its sides on tiny shapes on the CPU, its file and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from segue.bench.main import main
from segue.bench.steps.denoise import Painted, row_flops
from segue.engines.diffusion.contract import DenoiserContext
from segue.models.registry import family_of, read_config
from segue.models.shared.diffusion.shapes import SHAPES, write_shape

pytestmark = pytest.mark.slow

META = torch.device("meta")


def bench(tmp_path: Path, shape: str, sides: str, *more: str) -> dict[str, object]:
    where = ["--cache", str(tmp_path), "--out", str(tmp_path), "--shape", shape, "--sides", sides]
    options = more or ("--device", "cpu", "--dtype", "float32")
    assert main(["denoise", *where, "--clients", "1,2", "--steps", "3", *options]) == 0
    result: dict[str, object] = json.loads((tmp_path / f"denoise-{shape}.json").read_text())
    assert result["done"] == result["planned"]
    return result


def check(result: dict[str, object], sides: int) -> None:
    rows = result["denoised"]
    assert isinstance(rows, list)
    assert len(rows) == 2 * sides
    assert all(row["steps_per_second"] > 0 and row["flops"] > 0 for row in rows)
    assert all(0 < row["error"] < 0.5 for row in rows if row["side"] == "segue, fp8")


@pytest.mark.nightly  # test_bench_steps takes the same path
@pytest.mark.filterwarnings("ignore")  # the libraries say much when they are first imported
def test_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(bench(tmp_path, "tiny-image", "segue,eager,fp8,first-block"), 4)
    assert "| diffusers | 2 |" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the libraries say much when they are first imported
def test_videos(tmp_path: Path) -> None:
    check(bench(tmp_path, "tiny-video", "segue,eager"), 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "billions"), [("qwen-image", 20.43), ("wan2.2-ti2v-5b", 5.0)])
def test_published_shapes_have_their_weights(tmp_path: Path, name: str, billions: float) -> None:
    directory = write_shape(tmp_path, name)
    ctx = DenoiserContext(directory, "denoiser", META, torch.bfloat16, load_format="dummy")
    denoiser = family_of(read_config(directory), directory).load_stages().STAGE_MODELS["denoiser"](ctx)
    weights = sum(one.numel() for one in denoiser.network.parameters())
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)
    painted = Painted(
        directory=directory,
        shape=SHAPES[name],
        request=dict(SHAPES[name].request),
        device=META,
        dtype=torch.bfloat16,
        steps=1,
        together=1,
    )
    assert row_flops(painted) > 5e13


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", ["tiny-image", "tiny-video"])
def test_on_a_gpu(tmp_path: Path, shape: str) -> None:
    options = ("--device", "cuda:0", "--dtype", "bfloat16")
    check(bench(tmp_path, shape, "segue,eager,segue-compiled,compiled,fp8,taylorseer", *options), 6)
