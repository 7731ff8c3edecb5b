"""The bar by denoising step."""

from __future__ import annotations

import io

from segue.messages.deltas import ProgressDelta
from segue.orchestrator.omni.progress import StepBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(steps: list[tuple[int, int]], file: io.StringIO) -> str:
    """What two images of 4 steps each draw."""
    bar = StepBar(2, file)
    for index, step in steps:
        bar.show(ProgressDelta("denoiser", step, 4, index))
    bar.close()
    return file.getvalue()


def test_steps_of_all_images_are_one_bar() -> None:
    drawn = shown([(0, 1), (1, 1), (0, 2), (1, 2)], Terminal())
    assert "denoising:  50%" in drawn
    assert "4/8" in drawn


def test_steps_told_again_do_not_count() -> None:
    assert "3/8" in shown([(0, 1), (0, 2), (0, 1), (0, 2), (0, 3)], Terminal())


def test_nothing_is_drawn_where_nobody_looks() -> None:
    assert shown([(0, 1)], io.StringIO()) == ""
