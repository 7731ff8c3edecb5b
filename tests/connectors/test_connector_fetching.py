"""The consumer's side of connectors between hosts, over a source that fails."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from segue.connectors.base import Coming, Gone
from segue.connectors.fetching import Buffers, Consumer, SourceLost, Taken


@dataclass(frozen=True)
class Somewhere:
    pool: bytes = b"p"
    number: int = 1


class Broken:
    """A source whose fetch raises."""

    name = "nobody"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fetch(self, place: Any, buffers: Buffers) -> Taken | Gone:
        raise self._error

    def hung_up(self) -> bool:
        return False

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("error", [SourceLost("it ended"), OSError("no route"), RuntimeError("a library's own")])
def test_whatever_a_fetch_raises_its_request_gets_an_answer(error: Exception) -> None:
    woken = threading.Event()
    consumer = Consumer(lambda place: Broken(error), Buffers())
    assert isinstance(consumer.fetch(Somewhere(), "r", woken.set), Coming)
    assert woken.wait(60)
    found = consumer.fetch(Somewhere(), "r", woken.set)
    assert isinstance(found, Gone)
    assert str(error) in found.reason
    assert consumer.close()


def test_a_buffer_that_could_not_be_filled_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.take(5000)
    with pytest.raises(ValueError, match="broken"), buffers.filling(first):
        raise ValueError("broken")
    assert buffers.take(5000) is first
