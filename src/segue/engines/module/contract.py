"""The interface between the module engine and a model: a stage model whose work consists of batchable items."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from segue.engines.contract import Payload, StageRequest
from segue.messages.errors import SegueError


@dataclass(slots=True)
class Work:
    """One work item of one request, ready to run. Items of a request run and are emitted in order."""

    request_id: str
    item: Any
    bucket: Hashable = None
    """Only items of equal buckets share a call (length bucketing)."""
    cost: int = 1
    """Counts toward the engine's cost limit per call (e.g. padded frames or pixels)."""
    last: bool = False
    """The request is finished after this item."""
    ordered: bool = True
    """It needs state left by the request's earlier items, so it never shares a call with them."""
    played_at: float | None = None
    """Seconds of the request's audio before this item, 0 for its first one. None: nobody plays its output."""


@dataclass(slots=True)
class Result:
    """The result of one `Work`: a payload, or the error of this item alone."""

    payload: Payload | None = None
    """For downstream stages, and for the client: `samples` [n] float32 in [-1, 1] with `sample_rate`; `image`
    [height, width, 3] uint8 with `index`, which image it is; `video` [frames, height, width, 3] uint8 with `fps` and
    `first`, the number of frames before; `embedding` or `classes` [n] float32, the latter with `label`; `score`."""
    error: SegueError | None = None
    progress: tuple[int, int] | None = None
    """(steps done, total steps), if the item is a step of something longer."""
    prompt_tokens: int = 0
    """Tokens of the request in this result, for usage: set if the stage makes the main text output, or is the input
    stage of a model that generates no tokens."""
    modality_tokens: dict[str, int] = field(default_factory=dict)
    """`prompt_tokens` by modality; empty: all are text."""


class ModuleModel(Protocol):
    """An encoder, decoder, processor or vocoder as the engine sees it."""

    def warm_up(self) -> None:
        """Run small inputs of a first request, so that it need not wait for kernels to be built. Leaves no state that a
        request could see."""

    def begin(self, request: StageRequest) -> tuple[Any, list[Work]]:
        """State of a request and the items that can run at once (the input stage runs on the request itself)."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """One chunk from upstream → the items that became ready. Raises for that request alone."""

    def run(self, works: list[Work]) -> list[Result]:
        """One batched call over items of one bucket; results in the same order.

        Raising fails the whole call: the engine then runs the items one by one, so that only the faulty one fails.
        """

    def end(self, state: Any) -> None:
        """The request ended (finished, failed, cancelled): drop its state."""
