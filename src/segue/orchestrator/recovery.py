"""Which stages of a request must run again when a worker is lost; a pure function over the request's books."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class StageBook:
    """What the orchestrator knows of one stage of one request."""

    upstreams: tuple[str, ...]
    downstreams: tuple[str, ...]
    worker: str = ""
    """The incarnation it was given to; empty before the first."""
    address: str = ""
    attempt: int = 0
    done: bool = False
    inputs_done: set[str] = field(default_factory=set)
    """Upstreams whose last chunk it has got, in this attempt."""


def settled(name: str, books: dict[str, StageBook]) -> bool:
    """True when nobody needs anything more of this stage, nor of what its worker retained."""
    book = books[name]
    return book.done and all(books[down].done or name in books[down].inputs_done for down in book.downstreams)


def stages_to_rerun(books: dict[str, StageBook], alive: set[str], start: Iterable[str] = ()) -> set[str]:
    """The stages that must begin anew, given which workers are alive.

    A stage must when its worker is gone before it was settled. So must the upstream of such a stage when it cannot give
    its chunks again: its worker is gone as well, or it has let go of them because this stage had finished. `start`
    names stages that must begin anew for another reason.
    """
    again = set(start)
    again.update(name for name, book in books.items() if book.worker not in alive and not settled(name, books))
    frontier = list(again)
    while frontier:
        name = frontier.pop()
        for up in books[name].upstreams:
            gone = books[up].worker not in alive
            if up not in again and (gone or books[name].done):
                again.add(up)
                frontier.append(up)
    return again
