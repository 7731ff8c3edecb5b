"""Request state of engines whose requests hold only a state of their stage model; tracks paused and failed ones."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from segue.engines.contract import StageOutput, StageRequest
from segue.kernels.device import end_where_lost, out_of_memory
from segue.messages.errors import InvalidRequest, SegueError, StageFailed


@dataclass(slots=True)
class Entry:
    """One request in the engine, from `add` to its last output."""

    request: StageRequest
    state: Any
    """The stage model's state."""
    open_upstreams: set[str]
    """Upstreams that have not sent their final chunk."""
    paused: bool = False


EntryT = TypeVar("EntryT", bound=Entry)


class Entries(Generic[EntryT]):
    """Entries by request id, and the failures between steps."""

    def __init__(self, end: Callable[[Any], None]) -> None:
        """`end`: the stage model's, called once with the state of every removed entry."""
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
        """Raise `InvalidRequest` if a request with the same id is active."""
        if request.request_id in self._entries:
            raise InvalidRequest(f"request {request.request_id!r} is already in this stage", field="request_id")

    def add(self, entry: EntryT) -> None:
        self._entries[entry.request.request_id] = entry

    def leave(self, request_id: str) -> EntryT:
        """Remove a request after its last output."""
        entry = self._entries.pop(request_id)
        self._end(entry.state)
        return entry

    def cancel(self, request_id: str) -> None:
        """Remove a request and its unreported failure. Unknown ids are ignored."""
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
        """Remove a request and return the output that reports its error."""
        entry = self.leave(request_id)
        failure = as_error(error)
        failure.stage = failure.stage or entry.request.stage
        return StageOutput(request_id, finished=True, error=failure)

    def fail_later(self, request_id: str, error: Exception) -> None:
        """Remove a request; the next step reports its error."""
        self._failed.append(self.fail(request_id, error))

    @property
    def any_failed(self) -> bool:
        """Whether failures are waiting to be reported."""
        return bool(self._failed)

    def take_failed(self) -> list[StageOutput]:
        """Return and clear the failures, which a step reports first."""
        failed, self._failed = self._failed, []
        return failed


def as_error(error: Exception) -> SegueError:
    """Return errors of our own tree, and wrap others as a failure of the stage. An out-of-memory error is not kept as
    the cause, because its traceback holds the call's allocations. Raises `DeviceLost`."""
    if isinstance(error, SegueError):
        return error
    end_where_lost(error)
    if out_of_memory(error):
        first = str(error).partition("\n")[0]
        return StageFailed(f"no memory left for this request: {first or type(error).__name__}")
    wrapped = StageFailed(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
