"""Which stages run again when workers die: examples, and properties over random graphs and deaths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue.orchestrator.requests.request_state import StageState, settled, stages_to_rerun


def chain(**done: bool) -> dict[str, StageState]:
    """input → thinker → talker → vocoder, one worker each, all begun."""
    names = ["input", "thinker", "talker", "vocoder"]
    stages = {}
    for position, name in enumerate(names):
        ups = tuple(names[max(0, position - 1) : position])
        stages[name] = StageState(ups, tuple(names[position + 1 : position + 2]), worker=name, attempt=1)
        stages[name].done = done.get(name, False)
    for name, stage in stages.items():
        stage.inputs_done = {
            up for up in stage.upstreams if done.get(up, False) and not done.get(f"{up}_unheard", False)
        }
        assert name
    return stages


def alive(*dead: str) -> set[str]:
    return {"input", "thinker", "talker", "vocoder"} - set(dead)


def test_a_running_stage_is_run_again_and_its_upstreams_are_not() -> None:
    stages = chain(input=True)
    assert stages_to_rerun(stages, alive("thinker")) == {"thinker"}
    assert stages_to_rerun(chain(input=True, thinker=True), alive("vocoder")) == {"vocoder"}


def test_a_stage_that_everybody_is_done_with_may_die() -> None:
    assert stages_to_rerun(chain(input=True, thinker=True), alive("input", "thinker")) == set()


def test_a_stage_whose_last_chunk_was_not_heard_is_run_again() -> None:
    stages = chain(input=True, thinker=True, thinker_unheard=True)
    assert not settled("thinker", stages)
    # the input stage let its payload go when the thinker was done: it runs again too
    assert stages_to_rerun(stages, alive("thinker")) == {"thinker", "input"}


def test_an_upstream_that_died_before_is_run_again_for_its_downstream() -> None:
    stages = chain(input=True, thinker=True)
    assert stages_to_rerun(stages, alive("thinker", "talker")) == {"talker", "thinker", "input"}


def test_the_last_stage_is_settled_when_it_is_done() -> None:
    stages = chain(input=True, thinker=True, talker=True, vocoder=True)
    assert stages_to_rerun(stages, set()) == set()


def test_a_stage_can_be_named_to_begin_anew() -> None:
    stages = chain(input=True)
    assert stages_to_rerun(stages, alive(), {"talker", "thinker"}) == {"talker", "thinker"}


@st.composite
def books_and_deaths(draw: st.DrawFn) -> tuple[dict[str, StageState], set[str]]:
    count = draw(st.integers(1, 6))
    names = [f"s{number}" for number in range(count)]
    ups: dict[str, list[str]] = {name: [] for name in names}
    for position, name in enumerate(names):
        if position:
            ups[name] = draw(st.lists(st.sampled_from(names[:position]), min_size=1, unique=True))
    downs = {name: [other for other in names if name in ups[other]] for name in names}
    stages: dict[str, StageState] = {}
    for name in names:
        stage = StageState(tuple(ups[name]), tuple(downs[name]), worker=name, attempt=1)
        finished_ups = [up for up in ups[name] if stages[up].done]
        heard = set(draw(st.lists(st.sampled_from(finished_ups), unique=True))) if finished_ups else set()
        stage.inputs_done = heard
        stage.done = draw(st.booleans()) and heard == set(ups[name])
        stages[name] = stage
    living = set(draw(st.lists(st.sampled_from(names), unique=True)))
    return stages, living


@given(books_and_deaths())
def test_whatever_runs_again_can_get_its_inputs(case: tuple[dict[str, StageState], set[str]]) -> None:
    stages, living = case
    again = stages_to_rerun(stages, living)
    for name in again:
        for up in stages[name].upstreams:
            # its worker lives and still keeps the chunks (the stage had not finished), or it runs again too
            assert up in again or (stages[up].worker in living and not stages[name].done)


@given(books_and_deaths())
def test_nothing_runs_again_without_need(case: tuple[dict[str, StageState], set[str]]) -> None:
    stages, living = case
    again = stages_to_rerun(stages, living)
    for name in again:
        lost = stages[name].worker not in living and not settled(name, stages)
        needed = any(name in stages[down].upstreams for down in again)
        assert lost or needed
    if living >= set(stages):
        assert again == set()
