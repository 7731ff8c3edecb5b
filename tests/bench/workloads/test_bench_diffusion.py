"""`segue bench diffusion`: the same images for every side, mixes as they are named, figures that follow."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.bench import figures as pages
from segue.bench.diffusion.arguments import DiffusionBench
from segue.bench.diffusion.diffusion import Run, references
from segue.bench.diffusion.reference import Answer, Loaded
from segue.bench.diffusion.report import markdown, plot
from segue.bench.diffusion.results import (
    DiffusionResult,
    DiffusionScenario,
    DiffusionSettings,
    side_of,
)
from segue.bench.diffusion.workload import (
    CLOSED,
    OPEN,
    ImageOutcome,
    ImageRequest,
    Mix,
    WrongImage,
    differences,
    images,
)
from segue.bench.harness.hardware import Machine
from segue.bench.harness.load import LoadSlice
from segue.bench.harness.results import measure, write_result
from segue.bench.main import parser
from segue.cli.main import main as segue


def outcome(request: ImageRequest, jct: float = 1.0, seed: int = 0) -> ImageOutcome:
    noise = np.random.default_rng([request.index, seed]).integers(0, 256, (request.size, request.size, 3), np.uint8)
    return ImageOutcome(index=request.index, steps=request.steps, jct=jct, first_preview=jct / 2, image=noise.tobytes())


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), min_size=1, max_size=3, unique_by=lambda one: one[0]),
    st.integers(1, 4),
    st.integers(0, 50),
)
def test_a_mix_has_every_number_of_steps_as_often_as_it_says(parts, groups, start) -> None:
    mix = Mix(tuple(steps for steps, _ in parts), tuple(weight for _, weight in parts))
    count = groups * sum(mix.weights)
    asked = images(mix, 32, start, count, 4.0, seed=1)
    assert asked == images(mix, 32, start, count, 4.0, seed=1)
    assert [one.index for one in asked] == list(range(start, start + count))
    for steps, weight in parts:
        assert sum(one.steps == steps for one in asked) == groups * weight
    assert sum(one.steps for one in asked) / count == pytest.approx(mix.mean)


def test_requests_differ_by_seed_and_index() -> None:
    asked = images(OPEN, 32, 0, 40, 4.0, seed=0)
    assert len({one.seed for one in asked}) == 40
    assert len({one.prompt for one in asked}) > 10
    assert [one.prompt for one in asked] != [one.prompt for one in images(OPEN, 32, 0, 40, 4.0, seed=1)]


def test_a_plain_or_a_wrong_image_stops_the_benchmark() -> None:
    [request] = images(CLOSED, 8, 0, 1, 4.0, seed=0)
    outcome(request).check(request)
    for image in (b"", bytes(3 * 8 * 8), bytes(range(100))):
        wrong = ImageOutcome(index=0, steps=8, jct=1.0, first_preview=1.0, image=image)
        with pytest.raises(WrongImage, match="request 0"):
            wrong.check(request)


def test_figures_follow_from_the_outcomes() -> None:
    asked = images(Mix((4, 6), (1, 1)), 8, 0, 4, 4.0, seed=0)
    fast = [LoadSlice("a", 2.0, [outcome(one) for one in asked])]
    slow = [LoadSlice("b", 8.0, [outcome(one, 3.0) for one in asked])]
    figures = side_of(slow, fast, 0.1, 2**20)
    assert (figures.images_per_second, figures.steps_per_second) == (0.5, 2.5)
    assert figures.of_ceiling == pytest.approx(20 * 0.1 / 8)
    assert figures.network_of_ceiling is None
    assert side_of(slow, fast, 0.1, 2**20, 4.0).network_of_ceiling == pytest.approx(20 * 0.1 / 4)
    for one in slow[0].outcomes:
        one.network = 1.25
    assert side_of(slow, fast, 0.1, 2**20).network_of_ceiling == pytest.approx(20 * 0.1 / 5)
    assert figures.jct.mean == 3.0
    assert set(figures.jct_by_steps) == {4, 6}
    assert figures.largest_difference == 0.0
    other = [outcome(asked[0], seed=1), *(outcome(one) for one in asked[1:])]
    assert differences([outcome(one) for one in asked], other)["largest_difference"] > 0.5


def some_result() -> DiffusionResult:
    asked = images(CLOSED, 8, 0, 4, 4.0, seed=0)
    own = [LoadSlice("segue", 1.0, [outcome(one, 0.5) for one in asked])]
    theirs = [LoadSlice("diffusers", 3.0, [outcome(one) for one in asked])]
    sides = {"segue": side_of(own, own, 0.001, 2**20, 0.1), "diffusers": side_of(theirs, own, 0.001, 2**21)}
    return DiffusionResult(
        finished="2026-01-02T00:00:00+00:00",
        machine=Machine("a cpu", 2, 2**34, [], "Linux", "3.11", {"torch": "2"}, (0.0, 0.0, 0.0)),
        settings=DiffusionSettings(
            model="tiny",
            pipeline="SomePipeline",
            dtype="float32",
            seed=0,
            rounds=1,
            threads=2,
            guidance=4.0,
            versions={"diffusers": "1.0"},
            ceiling=2e11,
        ),
        startup={"segue": 2.0, "diffusers": 7.0},
        scenarios=[DiffusionScenario(name="8 x 8, 2 clients", size=8, clients=2, sides=sides)],
    )


def test_the_report_has_every_figure(tmp_path: Path) -> None:
    result = some_result()
    text = markdown(result)
    for part in ("3.00×", "50%", "200 GFLOP/s", "SomePipeline", "diffusers 1.0", "| segue | 2.0 |", "4% / 40%"):
        assert part in text, part
    plot(result, tmp_path / "diffusion.png")
    assert (tmp_path / "diffusion.png").stat().st_size > 10_000


class Painter:
    """Segue, and the process of the pipelines, at once."""

    name, startup, previews, pid = "segue", 0.5, 0, os.getpid()

    def __init__(self, most: int) -> None:
        """Breaks after `most` images."""
        self._left = most

    def processes(self) -> dict[int, str]:
        return {}

    def denoising(self) -> float:
        return 0.0

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def take_over(self, together: int) -> None: ...

    async def hand_over(self) -> None: ...

    async def send(self, policy: Any) -> None: ...

    async def ask(self, request: ImageRequest) -> Answer:
        return Answer(index=request.index, image=outcome(request).image, network=0.01)

    async def run(self, request: ImageRequest) -> ImageOutcome:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("it broke")
        return outcome(request)


def test_a_run_that_is_stopped_leaves_the_levels_it_has_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "diffusion.json"
    bench = DiffusionBench(
        model=tmp_path,
        sizes=[8],
        concurrency=[1, 2],
        requests=4,
        rounds=1,
        load=0.5,
        arrivals=2,
        keep=lambda so_far: write_result(so_far, path),
        say=lambda line: None,
    )
    segue = process = Painter(most=1 + 2 + 2 + 4)  # warming up and measured, of one client and of two
    loaded = Loaded(versions={}, flops={8: 1e9}, ceiling=1e11)
    empty = msgspec.structs.replace(some_result(), finished="", scenarios=[])
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(measure(empty, Run(bench, empty, loaded, segue, *references(process)).levels(), bench.keep))
    assert caught.group_contains(RuntimeError, match="it broke")
    assert pages.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "Unfinished: 2 of 4 levels." in printed
    assert "### 8 x 8, 2 clients" in printed
    assert "previews" not in printed


def test_arrivals_need_the_capacity_that_one_client_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert segue(["bench", "diffusion", "--concurrency", "4", "--model", "nowhere"]) == 2
    assert "--load needs 1 among --concurrency" in capsys.readouterr().err
    assert parser().parse_args(["diffusion"]).concurrency == [1, 4, 8]


def test_a_size_that_the_preset_has_not_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert segue(["bench", "diffusion", "--preset-size", "huge", "--cache", str(tmp_path)]) == 2
    assert "qwen-image has no size 'huge'; it has tiny, small" in capsys.readouterr().err


def test_step_caches_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    given = parser().parse_args(["diffusion", "--step-cache", "first_block:0.1", "--step-cache", "taylorseer"])
    assert given.step_cache == [("first_block", 0.1), ("taylorseer", None)]
    for wrong in ("tea", "taylorseer:0.1", "first_block:much", "first_block:-1"):
        with pytest.raises(SystemExit):
            parser().parse_args(["diffusion", "--step-cache", wrong])
    assert "it must be one of first_block, taylorseer, teacache" in capsys.readouterr().err
