"""A graph of models: checkpoints that hand their outputs on to each other, served as one.

    graph = ModelGraph("assistant")
    graph.model("hear", "out/whisper")
    graph.model("think", "out/qwen3")
    graph.model("speak", "out/pocket-tts")
    graph.edge("hear", "think")
    graph.edge("think", "speak")

An edge may depend on what its source made, and return to a model within a bound. `read_models` makes the stage graph of
it, or of a single checkpoint. No torch here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segue.graph.checks import check_loops, reachable, topological
from segue.graph.functions import module_at, name_of
from segue.graph.parts import INPUT, Edge, Link, OutputCondition
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError, nearest, shown
from segue.models.family import Family
from segue.models.registry import family_of, read_config
from segue.models.shared.checkpoint.files import located

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_ARGUMENTS = {"text": ("text",), "audio": ("samples", "rate"), "image": ("image",)}
"""What an edge may carry → the arguments of its transform."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its family."""

    called: str
    """Clients' name of it by default."""
    directory: Path
    config: dict[str, Any]
    family: Family
    graph: StageGraph

    @property
    def takes(self) -> frozenset[str]:
        """Modalities that a request must have, or may: a model that transcribes takes nothing but audio."""
        return frozenset({"audio"}) if self.family.speech is not None else self.graph.takes


@dataclass(frozen=True)
class Models:
    """The checkpoints of one served system."""

    called: str
    graph: StageGraph
    members: dict[str, Checkpoint]
    """By name; a single model's is empty."""
    givers: dict[str, str] = field(default_factory=dict)
    """Modality → the place from which the client gets it, in a graph of models."""
    main: str = ""
    """The place whose main stage makes the main output."""

    @property
    def places(self) -> Mapping[str, str]:
        """As in `StageGraph`."""
        return self.graph.places


@dataclass(frozen=True)
class _Model:
    name: str
    checkpoint: str | Path
    stage: str | None
    main: bool


@dataclass(frozen=True)
class _Reuse:
    name: str
    model: str
    main: bool


@dataclass(frozen=True)
class _Drawn:
    source: str
    target: str
    transform: Callable[..., Any] | None
    carries: str | None
    on: OutputCondition | None
    most: int | None
    revises: bool


class ModelGraph:
    """Models, and edges on which the output of one becomes the input of the next. `model` and `edge` build it; what is
    wrong with it is found when it is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._models: list[_Model] = []
        self._reused: list[_Reuse] = []
        self._edges: list[_Drawn] = []

    def model(self, name: str, checkpoint: str | Path, *, stage: str | None = None, main: bool = False) -> None:
        """Add a model.

        `checkpoint`: a directory, or OWNER/MODEL in the cache of Hugging Face's hub. `stage`: use only what makes the
        output of this stage of it. `main`: the client gets the outputs of this model, if several could give them.
        """
        self._models.append(_Model(name, checkpoint, stage, main))

    def reuse(self, name: str, model: str, *, main: bool = False) -> None:
        """Use a model at a further place of the graph: the same workers, with one copy of its weights.

        `name`: of the place, for edges, outputs and `sampling`, as if another model were there. `model`: the name that
        `model` gave it. `main`: as in `model`.
        """
        self._reused.append(_Reuse(name, model, main))

    def edge(
        self,
        source: str,
        target: str,
        *,
        transform: Callable[..., Any] | None = None,
        carries: str | None = None,
        on: OutputCondition | None = None,
        most: int | None = None,
        revises: bool = False,
    ) -> None:
        """Hand an output of one model on to another, as its user message or, for a model of speech, as the text to say.

        `carries`: `text`, `audio` or `image`, if the two models leave a choice. `transform`: a function at the top of
        a module, which runs in a worker: text → text, or (samples, rate) → samples, or image → image, or any of these →
        a list of messages.

        `on`: a request takes the edge only after visits of the source whose outcome satisfies this function of
        (request, outcome), which runs in the server. `most`: the edge returns to a model, and a request may take it so
        often; after each time, that model and all models after it are visited again. `revises`: what they then make
        replaces what they made before, so the client gets only the last; else one follows the other.
        """
        self._edges.append(_Drawn(source, target, transform, carries, on, most, revises))

    def read(self) -> Models:
        """Find the checkpoints and check the graph. Raises `ConfigError` for the first mistake, with the remedy."""
        where = f"graph {self.name!r}"
        self._check_names(where)
        found = {one.name: self._checkpoint(where, one) for one in self._models}
        models = {**{name: name for name in found}, **{one.name: one.model for one in self._reused}}
        at = {place: found[model] for place, model in models.items()}
        for edge in self._edges:
            _check_ends(where, edge, at, self._edges)
            _check_condition(where, edge)
        order = self._order(list(at))
        if len(at) > 1 and (alone := [name for name in order if not self._touching(name)]):
            raise ConfigError(f"{where}: no edge leads to the model {alone[0]!r} or from it; add one", field="model")
        links = [self._link(where, edge, at) for edge in self._edges]
        givers = self._givers(where, at)
        main = givers.get("text") or givers[min(givers)]
        places = {place: models[place] for place in order}
        members = {name: found[name] for name in dict.fromkeys(places.values())}
        graphs = {name: one.graph for name, one in members.items()}
        graph = StageGraph.joined(self.name, graphs, links, models[main], places)
        return Models(self.name, graph, members, givers, main)

    def _order(self, places: list[str]) -> tuple[str, ...]:
        """Return the places, each after its upstreams. Raises `ConfigError` for a wrong loop, e.g. without a bound."""
        edges = [Edge(one.source, one.target, most=one.most) for one in self._edges]
        order = topological(self.name, places, edges)
        check_loops(self.name, order, edges)
        closing = [edge for edge in self._edges if edge.most is not None]
        for edge in self._edges:
            if edge.revises and edge.most is None:
                raise ConfigError(
                    f"graph {self.name!r}: edge {edge.source!r} -> {edge.target!r} has revises=True, but does not "
                    "return: give it most=, or leave revises= out",
                    field="revises",
                )
        if len({edge.revises for edge in closing}) > 1:
            raise ConfigError(
                f"graph {self.name!r}: some of its edges that return have revises=True; all must have it, or none",
                field="revises",
            )
        return order

    @property
    def _marked(self) -> list[str]:
        return [one.name for one in self._placed if one.main]

    @property
    def _placed(self) -> list[_Model | _Reuse]:
        return [*self._models, *self._reused]

    def _check_names(self, where: str) -> None:
        if not self._models:
            raise ConfigError(f"{where} has no models; add them with model(name, checkpoint)", field="model")
        seen: set[str] = set()
        for one in self._placed:
            if not isinstance(one.name, str) or not _NAME.fullmatch(one.name) or one.name == INPUT:
                raise ConfigError(
                    f"{where}: model {one.name!r}: a name must be a letter, then letters, digits, - and _, and not "
                    f"{INPUT!r}",
                    field="model",
                )
            if one.name in seen:
                raise ConfigError(f"{where} has two models called {one.name!r}; names must differ", field="model")
            seen.add(one.name)
        own = [one.name for one in self._models]
        for reused in self._reused:
            if reused.model not in own:
                raise ConfigError(
                    f"{where}: {reused.name!r} reuses {reused.model!r}, which is no model of this graph"
                    f"{nearest(reused.model, own)}",
                    field="model",
                )

    def _checkpoint(self, where: str, model: _Model) -> Checkpoint:
        try:
            found = _read(model.checkpoint)
            found.graph.validate()
        except ConfigError as error:
            raise ConfigError(f"{where}: model {model.name!r}: {error.message}", field=error.field) from error
        if model.stage is None:
            return found
        known = {name: stage for name, stage in found.graph.stages.items() if stage.gives}
        if model.stage not in known:
            raise ConfigError(
                f"{where}: model {model.name!r} is to end at stage {model.stage!r}, which gives nothing, or is none of "
                f"it{nearest(model.stage, known)}",
                field="stage",
            )
        return Checkpoint(found.called, found.directory, found.config, found.family, found.graph.up_to(model.stage))

    def _touching(self, name: str) -> bool:
        return any(name in (edge.source, edge.target) for edge in self._edges)

    def _link(self, where: str, edge: _Drawn, members: dict[str, Checkpoint]) -> Link:
        at = f"{where}: edge {edge.source!r} -> {edge.target!r}"
        gives, takes = members[edge.source].graph.gives, members[edge.target].takes
        able = sorted(gives & takes & _ARGUMENTS.keys())
        both = f"{edge.source!r} gives {_names(sorted(gives))} and {edge.target!r} takes {_names(sorted(takes))}"
        if not able:
            raise ConfigError(f"{at}: nothing can go over it: {both}", field="edge")
        if edge.carries is None and len(able) > 1:
            raise ConfigError(f"{at}: {both}; say which goes over it: carries={' or '.join(map(repr, able))}")
        carries = able[0] if edge.carries is None else edge.carries
        if carries not in able:
            raise ConfigError(f"{at} carries {edge.carries!r}; it can carry {_names(able)}: {both}", field="carries")
        transform = "" if edge.transform is None else name_of(edge.transform, f"{at}: transform", _ARGUMENTS[carries])
        return Link(edge.source, edge.target, carries, transform, edge.on, edge.most, edge.revises)

    def _givers(self, where: str, members: dict[str, Checkpoint]) -> dict[str, str]:
        """For each modality: the model that gives it and is marked, else the last one that gives it."""
        forward = [edge for edge in self._edges if edge.most is None]
        after = {name: [edge.target for edge in forward if edge.source == name] for name in members}
        givers = {}
        for modality in sorted(frozenset().union(*(one.graph.gives for one in members.values()))):
            giving = [name for name, one in members.items() if modality in one.graph.gives]
            if len(marked := [name for name in giving if name in self._marked]) > 1:
                raise ConfigError(
                    f"{where} marks {_names(marked)} as main, which give {modality}; mark one", field="main"
                )
            last = marked or [name for name in giving if not (reachable(name, after) - {name}) & set(giving)]
            if len(last) > 1:
                raise ConfigError(
                    f"{where}: {modality} could be that of {_names(last)}, and no edge leads from one to the other; "
                    "mark the one that the client gets with main=True",
                    field="main",
                )
            givers[modality] = last[0]
        return givers


def read_models(model: str | Path | ModelGraph) -> Models:
    """Find the checkpoints of a model, of a graph of models, or of a file `*.py` with one. Raises `ConfigError`."""
    if isinstance(model, ModelGraph):
        return model.read()
    path = Path(model).expanduser()
    if path.suffix == ".py" and not path.is_dir():
        return graph_in(path).read()
    found = _read(model)
    return Models(found.called, found.graph, {"": found})


def graph_in(path: Path) -> ModelGraph:
    """Return the graph of models in a file. Raises `ConfigError`."""
    module = module_at(path)
    found = {id(value): name for name, value in vars(module).items() if isinstance(value, ModelGraph)}
    if len(found) != 1:
        have = f"has several: {_names(found.values())}" if found else "has none"
        raise ConfigError(f"{str(path)!r} must have one ModelGraph at the top of the module; it {have}", field="model")
    graph: ModelGraph = getattr(module, next(iter(found.values())))
    return graph


def _read(model: str | Path) -> Checkpoint:
    directory, called = located(model)
    config = read_config(directory)
    family = family_of(config, directory)
    return Checkpoint(called, directory, config, family, family.graph(config))


def _check_ends(where: str, edge: _Drawn, members: dict[str, Checkpoint], edges: list[_Drawn]) -> None:
    at = f"{where}: edge {edge.source!r} -> {edge.target!r}"
    for end in (edge.source, edge.target):
        if end not in members:
            raise ConfigError(f"{at} names no model {end!r} of this graph{nearest(end, members)}", field="edge")
    if edge.source == edge.target and edge.most is None:
        raise ConfigError(
            f"{at} leads from a model to itself; say with most= how often a request may take it", field="edge"
        )
    if sum((one.source, one.target) == (edge.source, edge.target) for one in edges) > 1:
        raise ConfigError(f"{at} is declared twice", field="edge")


def _check_condition(where: str, edge: _Drawn) -> None:
    """Check that a condition can be asked. Raises `ConfigError`."""
    if edge.on is None:
        return
    right = "a function of (request, outcome) that returns True or False"
    at = f"{where}: edge {edge.source!r} -> {edge.target!r} has on={shown(edge.on)}; it must be {right}"
    if not callable(edge.on) or inspect.iscoroutinefunction(edge.on) or inspect.isgeneratorfunction(edge.on):
        raise ConfigError(at, field="on")
    try:
        inspect.signature(edge.on).bind("request", "outcome")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{at}: {error}", field="on") from error


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
