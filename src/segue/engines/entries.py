"""The books of an engine whose requests hold nothing but a state of their adapter: who is there, paused, failed."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from segue.engines.contract import StageOutput, StageRequest
from segue.kernels.memory import out_of_memory
from segue.messages.errors import InvalidRequest, SegueError, StageFailed


@dataclass(slots=True)
class Entry:
    """One request in the engine, from `add` to its last output."""

    request: StageRequest
    state: Any
    """The adapter's own."""
    open_upstreams: set[str]
    """Upstreams that have not sent their final chunk."""
    paused: bool = False


EntryT = TypeVar("EntryT", bound=Entry)


class Entries(Generic[EntryT]):
    """Entries by request id, and the failures between steps."""

    def __init__(self, end: Callable[[Any], None]) -> None:
        """`end`: the adapter's, called once with the state of every entry that leaves."""
        self._end = end
        self._entries: dict[str, EntryT] = {}
        self._failed: list[StageOutput] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __getitem__(self, request_id: str) -> EntryT:
        return self._entries[request_id]

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> EntryT | None:
        return self._entries.get(request_id)

    def values(self) -> ValuesView[EntryT]:
        return self._entries.values()

    def items(self) -> ItemsView[str, EntryT]:
        return self._entries.items()

    def expect_new(self, request: StageRequest) -> None:
        """Raises `InvalidRequest` where one of its id is here."""
        if request.request_id in self._entries:
            raise InvalidRequest(f"request {request.request_id!r} is already in this stage", field="request_id")

    def add(self, entry: EntryT) -> None:
        self._entries[entry.request.request_id] = entry

    def leave(self, request_id: str) -> EntryT:
        """It has had its last output."""
        entry = self._entries.pop(request_id)
        self._end(entry.state)
        return entry

    def cancel(self, request_id: str) -> None:
        """Unknown ids are ignored; a failure that has not been told yet is told no more."""
        if request_id in self._entries:
            self.leave(request_id)
        self._failed = [output for output in self._failed if output.request_id != request_id]

    def pause(self, request_id: str) -> None:
        if request_id in self._entries:
            self._entries[request_id].paused = True

    def resume(self, request_id: str) -> None:
        if request_id in self._entries:
            self._entries[request_id].paused = False

    def fail(self, request_id: str, error: Exception) -> StageOutput:
        """It leaves; what is told of it."""
        entry = self.leave(request_id)
        told = as_error(error)
        told.stage = told.stage or entry.request.stage
        return StageOutput(request_id, finished=True, error=told)

    def fail_later(self, request_id: str, error: Exception) -> None:
        """It leaves; the next step tells of it."""
        self._failed.append(self.fail(request_id, error))

    @property
    def any_failed(self) -> bool:
        """There is something to tell."""
        return bool(self._failed)

    def take_failed(self) -> list[StageOutput]:
        """What a step tells first."""
        failed, self._failed = self._failed, []
        return failed


def as_error(error: Exception) -> SegueError:
    """Errors of our own tree pass; anything else is the stage's failure and says what it was. Of what was not there for
    lack of memory nothing is kept: what the call had got by then hangs on the traceback."""
    if isinstance(error, SegueError):
        return error
    if out_of_memory(error):
        first = str(error).partition("\n")[0]
        return StageFailed(f"there is no memory left for what this request needs here: {first or type(error).__name__}")
    wrapped = StageFailed(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
