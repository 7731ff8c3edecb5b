"""The error tree: one class per remedy.

    SegueError
    ├── ConfigError         the graph, deployment or checkpoint is wrong: correct it, start again
    ├── InvalidRequest      the request is wrong: the client corrects it (HTTP 400)
    │   ├── TooLarge        over a limit of this deployment (413)
    │   ├── TooLong         the prompt does not fit into the context (400)
    │   └── NotFound        no such model, voice, file or job (404)
    ├── Overloaded          the queue is full: try again later (429)
    ├── ShuttingDown        this server is being stopped: try another (503)
    ├── DeadlineExceeded    the request's own deadline passed (504)
    ├── Cancelled           the client went away (499)
    └── StageFailed         a stage could not serve the request: a bug of ours, or a device fault (500)
        └── StageLost       the stage's worker died and the retries are spent (503)

Errors cross processes as :class:`segue.messages.wire.Failed` and are rebuilt by :func:`error_from`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr
from typing import ClassVar

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 2


LONGEST_NAME = 256
"""Most characters of a client's name that an error repeats; longer names are compared with no known name."""


class SegueError(Exception):
    """Base of every error this program raises on purpose."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, field: str | None = None, stage: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field if field is None or len(field) <= LONGEST_NAME else f"{field[:LONGEST_NAME]}…"
        self.stage = stage


class ConfigError(SegueError, ValueError):
    """The graph, the deployment or the checkpoint cannot be served as it is written."""

    code = "config_error"


class InvalidRequest(SegueError, ValueError):
    """The request is wrong; `field` names the part, the message gives the value and the remedy."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class TooLarge(InvalidRequest):
    """The request exceeds a limit of this deployment; the message names limit and key."""

    status = 413
    code = "too_large"


class TooLong(InvalidRequest):
    """The prompt does not fit into the context; the message gives both lengths."""

    code = "context_length_exceeded"


class NotFound(InvalidRequest):
    """A name that does not resolve."""

    status = 404
    code = "not_found"


class Overloaded(SegueError):
    """The queue is full; the client may try again."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class ShuttingDown(SegueError):
    """This server is being stopped; another one may take the request."""

    status = 503
    code = "shutting_down"


class DeadlineExceeded(SegueError):
    """The request's own deadline passed before it finished."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(SegueError):
    """The client disconnected or cancelled the request."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class StageFailed(SegueError):
    """A stage could not serve the request; `stage` names it."""

    code = "stage_failed"


class StageLost(StageFailed):
    """The worker of a stage died and the retries of the request are spent."""

    status = 503
    code = "stage_lost"


_TREE: dict[str, type[SegueError]] = {
    cls.__name__: cls
    for cls in (
        SegueError,
        ConfigError,
        InvalidRequest,
        TooLarge,
        TooLong,
        NotFound,
        Overloaded,
        ShuttingDown,
        DeadlineExceeded,
        Cancelled,
        StageFailed,
        StageLost,
    )
}


def error_from(kind: str, message: str, *, field: str | None = None, stage: str | None = None) -> SegueError:
    """Rebuild an error from the class name and texts that crossed a process; an unknown kind becomes `StageFailed`."""
    return _TREE.get(kind, StageFailed)(message, field=field, stage=stage)


def shown(value: object) -> str:
    """Return the `repr` of a client's value, shortened to fit a message."""
    return _SHORT.repr(value)


def wrong(field: str, value: object, right: str) -> InvalidRequest:
    """Return an `InvalidRequest` that reads, for example, `n is 0; it must be at least 1`."""
    return InvalidRequest(f"{field} is {shown(value)}; it must be {right}", field=field)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the tail of an "unknown name" message: `"; did you mean 'x'?"`, or the list of known names."""
    names = sorted(known)
    comparable = isinstance(name, str) and len(name) <= LONGEST_NAME  # the cost grows with the square of the length
    close = get_close_matches(str(name), names, n=1, cutoff=0.5) if comparable else []
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""
