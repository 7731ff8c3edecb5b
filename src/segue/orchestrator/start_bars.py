"""What a start looks like in a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm import tqdm

from segue.observe.stderr import say


class StartBars:
    """One bar per worker while the stages load; where stderr is no terminal, one line per worker when it is ready.

    `log`: of a program that has one, where these lines go in place of stderr.
    """

    def __init__(self, *, log: logging.Logger | None = None, drawn: bool = True) -> None:
        self._bars: dict[str, tqdm[Any]] = {}
        self._log = log
        self._drawn = drawn and sys.stderr.isatty()
        self._closed = False

    def show(self, worker: str, fraction: float, what: str) -> None:
        if self._closed:
            return  # a worker that comes back later: the log has it
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
            return  # a report per tensor: redraw only what can be seen
        bar.set_postfix_str(what[:40], refresh=False)
        bar.n = percent
        bar.refresh()

    def close(self) -> None:
        self._closed = True
        for bar in self._bars.values():
            bar.close()
