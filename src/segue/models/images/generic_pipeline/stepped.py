"""Run a call in pieces: it pauses where it asks to, until it is resumed or abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class GivenUp(Exception):
    """Raised within the call when it is abandoned."""


class Stepped:
    """Runs `call(pause)` on its own thread, which never runs at the same time as the calling thread."""

    def __init__(self, call: Callable[[Callable[[], None]], Any], device: torch.device) -> None:
        """`device`: where the call computes. A new thread starts on the first GPU, whatever the process's other threads
        use."""
        self._call = call
        self._device = device
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._given_up = False
        self._error: BaseException | None = None
        self._result: Any = None
        self.pauses = 0
        self.done = False

    def advance(self) -> None:
        """Run to the next pause, or to the end. Raises the call's exceptions."""
        if self.done:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def finish(self) -> Any:
        """Run to the end and return the call's result."""
        while not self.done:
            self.advance()
        return self._result

    def give_up(self) -> None:
        """End the call at its current pause. Does nothing if it has ended, or not begun."""
        if self._thread is None or self.done:
            self.done = True
            return
        self._given_up = True
        self._go.release()
        self._thread.join()

    def _pause(self) -> None:
        self.pauses += 1
        self._stopped.release()
        self._go.acquire()
        if self._given_up:
            raise GivenUp

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._result = self._call(self._pause)
        except BaseException as error:  # raised again in the calling thread
            self._error = error
        self.done = True
        self._stopped.release()
