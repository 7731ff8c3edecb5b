"""Progress bars in a terminal: one per worker during the start, and one of denoising steps while images or video are
made."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from tqdm import tqdm

from segue.messages.deltas import ProgressDelta
from segue.observe.stderr import say


class StepBar:
    """One bar over the steps of all outputs of one request; draws nothing if `file` is not a terminal."""

    def __init__(self, outputs: int, file: TextIO | None = None) -> None:
        """`outputs`: images or videos of the request. `file`: standard error, by default."""
        self._outputs = outputs
        self._file = sys.stderr if file is None else file
        self._drawn = self._file.isatty()
        self._done: dict[int, int] = {}
        self._bar: tqdm[None] | None = None

    def show(self, delta: ProgressDelta) -> None:
        """Show that a step is done. A restarted stage reports its steps again, but the bar never goes back."""
        if not self._drawn:
            return
        if self._bar is None:
            self._bar = tqdm(total=delta.steps * self._outputs, desc="denoising", unit="step", file=self._file)
        before = self._done.get(delta.index, 0)
        if delta.step > before:
            self._done[delta.index] = delta.step
            self._bar.update(delta.step - before)

    def close(self) -> None:
        """Leave the bar on the screen and continue below it."""
        if self._bar is not None:
            self._bar.close()


class StartBars:
    """One bar per worker while the stages load; if stderr is not a terminal, one line per worker when it is ready.

    `log`: logger of the program, which gets these lines instead of stderr.
    """

    def __init__(self, *, log: logging.Logger | None = None, drawn: bool = True) -> None:
        self._bars: dict[str, tqdm[Any]] = {}
        self._log = log
        self._drawn = drawn and sys.stderr.isatty()
        self._closed = False

    def show(self, worker: str, fraction: float, what: str) -> None:
        if self._closed:
            return  # a worker that restarts later is reported in the log
        if not self._drawn:
            if fraction < 1.0 or what != "ready":
                return
            if self._log is None:
                say(f"{worker} is ready\n")
            else:
                self._log.info("%s is ready", worker)
            return
        bar = self._bars.get(worker)
        if bar is None:
            bar = tqdm(
                total=100, desc=worker, position=len(self._bars), bar_format="{desc:>16} {bar} {n:3.0f}% {postfix}"
            )
            self._bars[worker] = bar
        percent = round(100 * fraction)
        if percent == bar.n and percent != 100:
            return  # there is a report per tensor: redraw only visible changes
        bar.set_postfix_str(what[:40], refresh=False)
        bar.n = percent
        bar.refresh()

    def close(self) -> None:
        self._closed = True
        for bar in self._bars.values():
            bar.close()
