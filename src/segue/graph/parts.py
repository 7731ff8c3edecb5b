"""The parts of a stage graph: stages and edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType

from segue.messages.request import Request

INPUT = "input"
"""The stage that every graph has implicitly: it turns the request into tensors."""

OUTPUT = "output"
"""The stage that a graph has implicitly if it gives something of which there are files: it makes them for clients that
ask for a file instead of samples or pixels."""

BUILT_IN = frozenset({INPUT, OUTPUT})
"""The stages that no family declares: CPU workers without a network."""

CLIENT = "client"
"""The upstream of the input stage of an open request: its chunks are what the client appends."""

TOKENS = "tokens"
"""The output of every graph's input stage: the prompt as token ids. Not a model's modality, so no graph lists it."""

Condition = Callable[[Request], bool]
"""Whether an edge exists for a request."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a visit of a stage gave, as far as conditions on outputs may look at it."""

    visit: int
    """0 for the request's first visit of the stage."""
    finish_reason: str = ""
    """Of a stage that samples tokens: `stop`, `length`, …"""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it, if the request names it."""
    token_ids: tuple[int, ...] = ()
    """Token ids that the visit sampled, its end token included."""
    facts: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """Numbers, texts and truth values at the top of the last payload of a stage without tokens, e.g. its `label`."""
    text: str = ""
    """In a graph of models: what the model wrote, without its reasoning and its calls of tools."""


OutputCondition = Callable[[Request, Outcome], bool]
"""Whether a request takes an edge after a visit of the stage that the edge leaves."""


def full_name(member: str, stage: str) -> str:
    """Return the name of a stage within a graph of models, e.g. `think.llm`; `member` is empty in a single model's."""
    return f"{member}.{stage}" if member else stage


def member_of(stage: str) -> str:
    """Return the model of a graph of models that a stage belongs to; empty in a single model's graph."""
    return stage.rpartition(".")[0]


def own_name(stage: str) -> str:
    """Return the name of a stage, or of the stage of a visit, within its own model, which its family knows it by."""
    return stage_of(stage.rpartition(".")[2])


def visit_name(stage: str, visit: int) -> str:
    """Return the name of a visit of a stage: that of visit 0 is the stage's own, that of visit 2 of `draw` is `draw@2`.
    Whatever is kept of a request at a stage is kept by this name."""
    return f"{stage}@{visit}" if visit else stage


def stage_of(visit: str) -> str:
    """Return the stage that a visit is of."""
    return visit.partition("@")[0]


def number_of(visit: str) -> int:
    """Return which of its stage's visits this is, counted from 0."""
    return int(visit.partition("@")[2] or 0)


def is_input(stage: str) -> bool:
    """Whether this is an input stage: there is one for each model."""
    return own_name(stage) == INPUT


def is_built_in(stage: str) -> bool:
    """Whether no family declares the stage: a model's input stage or its output stage."""
    return own_name(stage) in BUILT_IN


def only_reads(group: tuple[str, ...]) -> bool:
    """Whether a worker runs an input stage and nothing else."""
    return len(group) == 1 and is_input(group[0])


@dataclass(frozen=True, slots=True)
class WantsFile:
    """The condition of an edge to `OUTPUT`: the client asks for a file of something that the source gives."""

    gives: frozenset[str]

    def __call__(self, request: Request) -> bool:
        return not self.gives.isdisjoint(request.formats)


@dataclass(frozen=True, slots=True)
class Stage:
    """One component of the model. `StageGraph.validate` checks the engine and the modalities."""

    name: str
    engine: str
    """Name of its engine kind (`segue.graph.kinds`)."""
    takes: frozenset[str] = frozenset()
    """Modalities of the request that this stage reads (it then has an edge from `INPUT`)."""
    gives: frozenset[str] = frozenset()
    """Modalities of the response that this stage makes."""
    fuse_with: str | None = None
    """The stage to share a worker with unless the deployment says otherwise."""
    shares_with: str | None = None
    """The stage upstream whose weights and caches it uses: both are in one worker, whatever the deployment says."""
    main: bool = False
    divisible: bool = False
    """Whether its stage model can load one rank's part of the weights (`tensor_parallel`)."""
    without: frozenset[str] = frozenset()
    """Keys of its engine's deployment section that it does not support: refused there, ignored as defaults."""
    library: str = ""
    """The components of a library's pipeline that run in it; shown in listings."""
    tensors: tuple[str, ...] = ()
    """Prefixes of the names of its weights in the checkpoint; of several that fit a name, the longest counts."""

    @property
    def media_only(self) -> bool:
        """Whether the stage runs only for requests that carry media it takes."""
        return bool(self.takes) and "text" not in self.takes


@dataclass(frozen=True, slots=True)
class Edge:
    """A stream from stage to stage; with `when`, only for requests that satisfy it."""

    source: str
    target: str
    when: Condition | None = None
    on: OutputCondition | None = None
    """It is taken only after visits of the source whose outcome satisfies this."""
    most: int | None = None
    """Of an edge that closes a loop: how often a request may take it. None: it closes none."""

    @property
    def condition(self) -> str | None:
        """The conditions as displayed, with the bound of a loop."""
        parts = [] if self.when is None else [_name_of(self.when)]
        parts += [] if self.on is None else [f"on {_name_of(self.on)}"]
        parts += [] if self.most is None else [f"returns at most {self.most}x"]
        return ", ".join(parts) or None


@dataclass(frozen=True, slots=True)
class Link:
    """What one model of a graph of models hands to another: its output of a modality becomes the other's input."""

    source: str
    target: str
    carries: str
    transform: str = ""
    """The function applied to it, which the target's input worker imports: `MODULE:NAME` or `FILE.py:NAME`."""
    on: OutputCondition | None = None
    """As in `Edge`."""
    most: int | None = None
    """As in `Edge`."""
    revises: bool = False
    """Of one that closes a loop: what the next visits make replaces what the visits before made."""

    @property
    def condition(self) -> str | None:
        """As `Edge.condition`."""
        shown = Edge(self.source, self.target, on=self.on, most=self.most).condition
        return f"{shown}, revises" if self.revises else shown


def _name_of(condition: Callable[..., object]) -> str:
    if isinstance(condition, partial):
        return _name_of(condition.func)
    if isinstance(condition, FunctionType | MethodType):
        return "condition" if condition.__name__ == "<lambda>" else condition.__name__
    return type(condition).__name__
