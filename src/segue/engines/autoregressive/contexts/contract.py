"""The interface between an engine that lends contexts, the stage model whose requests read them, and the stage model
that attends to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from segue.engines.autoregressive.contract import Prompt
from segue.engines.contract import Payload, StageRequest
from segue.kernels.kv.store import KVStore


@dataclass(frozen=True, slots=True)
class View:
    """A context: the first tokens of a sequence."""

    sequence: int
    """Index in `Contexts.prompts`; without tokens, of none."""
    length: int
    """Number of its tokens; may be 0."""
    position: int
    """Rotary position of what follows it."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """What a request reads."""

    prompts: Sequence[Prompt]
    """The last token of each only follows its context, and is not computed. Empty: nobody attends to this visit."""
    views: Sequence[View]
    settings: Payload = field(default_factory=dict)
    """Sent along with the views."""


class Reading(Protocol):
    """The inputs of one request that reads contexts. A stage model makes it."""

    def feed(self, upstream: str, payload: Payload, *, final: bool) -> bool:
        """Take one chunk from upstream; returns whether all input of the first visit has arrived. Raises
        `InvalidRequest`."""

    def visited(self) -> None:
        """Begin a visit, whose input has all arrived."""

    def thoughts(self) -> Prompt | None:
        """The prompt of a reply that is drawn first and becomes part of the contexts; None: there is none."""

    def contexts(self, thoughts: Sequence[int]) -> Contexts:
        """What is read in this visit. `thoughts`: the ids of its reply, its end token included."""


@runtime_checkable
class ReadsContexts(Protocol):
    """A stage model some of whose requests read contexts for another stage of the worker."""

    def reading(self, request: StageRequest) -> Reading | None:
        """None: an ordinary request, which goes to `begin`."""


class LendsContexts(Protocol):
    """The engine as the stage model of another engine sees it (`SameWorker.engines`)."""

    @property
    def store(self) -> KVStore:
        """Keys and values, to be read only."""

    def blocks(self, lease: int, view: View) -> Sequence[int]:
        """The blocks of a view, until the lease ends: by `release`, or because the request is cancelled. Raises
        `KeyError` after it."""

    def release(self, lease: int) -> None:
        """End a lease and free its blocks. One that has ended is ignored."""
