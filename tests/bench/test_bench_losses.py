"""`segue bench diffusion --losses`: errors and speeds that follow from the pictures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from segue.bench.diffusion_workload import PictureOutcome
from segue.bench.hardware import Machine
from segue.bench.losses import TOGETHER, LossResult, loss, markdown
from segue.bench.main import parser
from segue.bench.page import render
from segue.bench.result_file import write_result


def outcome(index: int, jct: float, picture: np.ndarray) -> PictureOutcome:
    return PictureOutcome(index=index, steps=4, jct=jct, first_preview=jct, picture=picture.astype(np.uint8).tobytes())


def test_errors_and_speeds() -> None:
    grey = np.full((8, 8, 3), 100)
    exact = [outcome(0, 2.0, grey), outcome(1, 4.0, grey)]
    other = [outcome(0, 1.0, grey), outcome(1, 1.0, grey + 51)]  # 0.2 of the range, in one of two
    figures = loss(other, exact)
    assert figures.speed == pytest.approx(3.0)
    assert figures.psnr == pytest.approx(-10 * np.log10(0.04 / 2))
    assert figures.lowest_psnr == pytest.approx(-10 * np.log10(0.04))
    assert figures.largest_difference == pytest.approx(0.2)
    assert figures.mean_difference == pytest.approx(0.1)
    same = loss(exact, exact)
    assert (same.psnr, same.lowest_psnr, same.speed) == (None, None, 1.0)


def test_a_result_is_read_again(tmp_path: Path) -> None:
    grey = np.full((8, 8, 3), 100)
    exact, other = [outcome(0, 2.0, grey)], [outcome(0, 1.0, grey + 51)]
    result = LossResult(
        finished="2026-01-02T00:00:00+00:00",
        machine=Machine("a cpu", 2, 2**34, [], "Linux", "3.11", {"torch": "2"}, (0.0, 0.0, 0.0)),
        model="tiny",
        pipeline="SomePipeline",
        dtype="float32",
        size=8,
        steps="all of 4 steps",
        pictures=1,
        guidance=1.0,
        seed=0,
        sides={"segue": loss(exact, exact), "segue, int8": loss(other, exact), TOGETHER: loss(exact, exact)},
        refused=["segue, first_block 0.1: not made of blocks"],
    )
    path = tmp_path / "losses.json"
    write_result(result, path)
    assert msgspec.json.decode(path.read_bytes(), type=LossResult) == result
    text = markdown(result)
    for part in ("| segue, int8 | 1.00 | 2.00× | 14.0 | 14.0 | 0.2000 / 0.2000 |", "equal", "not made of blocks"):
        assert part in text, part
    assert "### Losses: SomePipeline" in render([path])


def test_the_option() -> None:
    asked = parser().parse_args(["diffusion", "--losses", "--step-cache", "first_block:0.4"])
    assert asked.losses
    assert asked.step_cache == [("first_block", 0.4)]
