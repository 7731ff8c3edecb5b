"""Which visits a request makes: random loops, whose visits end in any order with any outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.graph.course import Course
from segue.graph.parts import Outcome, number_of, stage_of, visit_name
from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.errors import StageFailed
from segue.messages.request import Request

ASK = Request(request_id="r", modalities=["text"])


@dataclass(frozen=True)
class Verdict:
    """A condition whose answer is drawn from the visit's outcome."""

    edge: str

    def __call__(self, request: Request, outcome: Outcome) -> bool:
        return bool(Random(f"{self.edge} {outcome.visit} {outcome.facts['seed']}").getrandbits(1))


@st.composite
def loops(draw: st.DrawFn) -> StageGraph:
    """A head, stages behind it with conditional and other edges, and edges that return."""
    graph = StageGraph("random")
    graph.stage("before", "module", takes={"text"})
    graph.stage("head", "autoregressive", gives={"text"})
    graph.edge("before", "head")
    names = ["head", *(f"s{number}" for number in range(draw(st.integers(1, 4))))]
    for place, name in enumerate(names[1:], 1):
        graph.stage(name, "module", gives=draw(st.sampled_from([(), ("image",)])))
        for up in draw(st.sets(st.sampled_from(names[:place]), min_size=1)):
            graph.edge(up, name, on=Verdict(f"{up} {name}") if draw(st.booleans()) else None)
    closing = draw(st.sets(st.sampled_from(names[1:]), min_size=1))
    closing |= {name for name in names[1:] if not graph.stages[name].gives and not graph.downstreams(name)}
    for name in sorted(closing):
        verdict = Verdict(f"{name} head") if draw(st.booleans()) else None
        graph.edge(name, "head", most=draw(st.integers(1, 3)), on=verdict)
    return graph


def run(graph: StageGraph, seed: int, choose: Callable[[int], int]) -> Course:
    """End one visit after the other; `choose` picks the next among those that run."""
    walk = graph.walk(Request(request_id="r", modalities=sorted(graph.gives)))
    course = Course(walk)
    running = course.advance()
    assert running[0] == INPUT
    ended: set[str] = set()
    waited: list[tuple[str, set[str]]] = []
    while running:
        assert not course.over or not course.advance()
        visit = running.pop(choose(len(running)))
        ended.add(visit)
        course.end(visit, Outcome(number_of(visit), facts={"seed": seed}), ASK)
        new = course.advance()
        for begun in new:
            stage, number = stage_of(begun), number_of(begun)
            ups = course.begun[begun]
            assert begun == INPUT or ups, "it has an input"
            assert all(up in course.begun for up in ups)
            assert all(course.decided(up, begun) and begun in course.targets(up) for up in ups)
            if number:
                waited.append((visit_name(stage, number - 1), set(ended)))
        running += new
    assert all(earlier in then for earlier, then in waited if earlier in course.begun), "one visit after the other"
    return course


@settings(max_examples=150, deadline=None)
@given(loops(), st.integers(0, 9), st.data())
def test_any_order_of_ends_gives_the_same_bounded_visits(graph: StageGraph, seed: int, data: st.DataObject) -> None:
    graph.validate()
    course = run(graph, seed, lambda count: 0)
    assert course.over, "all that began has ended, so nothing more begins"
    most = {edge.source: edge.most for edge in graph.edges if edge.most is not None}
    taken = [stage_of(up) for visit, ups in course.begun.items() if stage_of(visit) == "head" for up in ups]
    assert all(taken.count(source) <= bound for source, bound in most.items() if bound is not None)
    other = run(graph, seed, lambda count: data.draw(st.integers(0, count - 1)))
    assert other.begun == course.begun
    assert other.stopped_by == course.stopped_by


def drawing(most: int = 2, **conditions: Callable[[Request, Outcome], bool]) -> Course:
    graph = StageGraph("drawing")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("draw", "module")
    graph.stage("see", "module")
    graph.edge("llm", "draw", on=conditions.get("draws"))
    graph.edge("draw", "see")
    graph.edge("see", "llm", most=most)
    return Course(graph.walk(ASK))


def end(course: Course, *visits: str) -> list[str]:
    for visit in visits:
        course.end(visit, Outcome(number_of(visit), token_ids=(1, 2)), ASK)
    return course.advance()


def test_a_bound_cuts_what_leads_only_to_a_return() -> None:
    course = drawing(1, draws=lambda request, outcome: True)
    assert course.advance() == [INPUT, "llm"]
    assert not course.decided("llm", "draw")
    assert end(course, INPUT, "llm") == ["draw", "see", "llm@1"], "what comes back streams into its next visit"
    assert course.begun["llm@1"] == ("see",)
    assert not course.over
    assert end(course, "draw", "see", "llm@1") == []
    assert course.over
    assert course.stopped_by == "see -> llm"
    assert "draw@1" not in course.begun


def test_a_loop_without_conditions_runs_its_bound() -> None:
    course = drawing(2)
    course.advance()
    running = [INPUT, "llm", "draw", "see"]
    while running:
        running = end(course, *running)
    assert course.last == 2
    assert course.over
    assert course.stopped_by is None, "it was meant to"
    assert "see@2" not in course.begun, "nobody wants it"


def test_a_condition_that_does_not_answer() -> None:
    course = drawing(draws=lambda request, outcome: None)  # type: ignore[arg-type, return-value]
    course.advance()
    with pytest.raises(StageFailed, match=r"edge 'llm' -> 'draw' gave None; it must give True or False"):
        end(course, "llm")


def test_a_slow_stage_makes_its_visits_one_after_the_other() -> None:
    graph = StageGraph("speaking")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("see", "module")
    graph.stage("speak", "module", gives={"audio"})
    graph.edge("llm", "see")
    graph.edge("llm", "speak")
    graph.edge("see", "llm", most=3)
    course = Course(graph.walk(Request(request_id="r", modalities=["text", "audio"])))
    course.advance()
    end(course, INPUT, "llm", "see")
    end(course, "llm@1", "see@1")
    end(course, "llm@2", "see@2")
    spoken = [visit for visit in course.begun if stage_of(visit) == "speak"]
    assert spoken == ["speak"], "it still speaks what the first visit wrote"
    assert end(course, "speak") == ["speak@1"]
    assert end(course, "speak@1") == ["speak@2"]
