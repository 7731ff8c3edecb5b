"""What a stage graph is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Literal

from segue.messages.request import Request

INPUT = "input"
"""The stage every graph has by itself: it turns the request into tensors."""

TOKENS = "tokens"
"""What the input stage gives, in every graph: the prompt as token ids. No modality of a model, so no graph lists it."""

Engine = Literal["autoregressive", "diffusion", "module"]
Condition = Callable[[Request], bool]


@dataclass(frozen=True, slots=True)
class Stage:
    """One component of the model. The engine and the modalities are as written; `StageGraph.validate` checks them."""

    name: str
    engine: str
    """`autoregressive`, `diffusion` or `module`."""
    takes: frozenset[str] = frozenset()
    """Modalities of the request this stage reads (it then has an edge from `INPUT`)."""
    gives: frozenset[str] = frozenset()
    """Modalities of the client's answer this stage makes."""
    fuse_with: str | None = None
    """The stage to share a worker with where the deployment says nothing."""
    main: bool = False
    divisible: bool = False
    """Its adapter takes a rank's part of the weights (`tensor_parallel`)."""
    library: str = ""
    """What of a library's own pipeline runs in it, for people."""

    @property
    def media_only(self) -> bool:
        """Runs only for requests that carry media it takes."""
        return bool(self.takes) and "text" not in self.takes


@dataclass(frozen=True, slots=True)
class Edge:
    """A stream from stage to stage; with `when`, only for the requests it is true of."""

    source: str
    target: str
    when: Condition | None = None

    @property
    def condition(self) -> str | None:
        """Name of the condition, for people."""
        return None if self.when is None else _name_of(self.when)


def _name_of(condition: Callable[..., object]) -> str:
    if isinstance(condition, partial):
        return _name_of(condition.func)
    if isinstance(condition, FunctionType | MethodType):
        return "condition" if condition.__name__ == "<lambda>" else condition.__name__
    return type(condition).__name__
