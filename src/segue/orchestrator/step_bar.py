"""A bar by denoising step, while pictures or video are made."""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm

from segue.messages.deltas import ProgressDelta


class StepBar:
    """One bar over the steps of all outputs of one request; nothing where `file` is no terminal."""

    def __init__(self, outputs: int, file: TextIO | None = None) -> None:
        """`outputs`: pictures or videos of the request. `file`: standard error, by default."""
        self._outputs = outputs
        self._file = sys.stderr if file is None else file
        self._drawn = self._file.isatty()
        self._done: dict[int, int] = {}
        self._bar: tqdm[None] | None = None

    def show(self, delta: ProgressDelta) -> None:
        """A step is done. A stage that runs again tells of its steps again: the bar never goes back."""
        if not self._drawn:
            return
        if self._bar is None:
            self._bar = tqdm(total=delta.steps * self._outputs, desc="denoising", unit="step", file=self._file)
        before = self._done.get(delta.index, 0)
        if delta.step > before:
            self._done[delta.index] = delta.step
            self._bar.update(delta.step - before)

    def close(self) -> None:
        """Leave the bar as it is and go on below it."""
        if self._bar is not None:
            self._bar.close()
