"""When a request is over: stages tell of their ends in whatever order."""

from __future__ import annotations

from itertools import permutations

import pytest

from segue.graph.walk import WalkStage
from segue.messages.request import Request
from segue.messages.wire import Emission, OutputEnd, StageDone
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.requests.request_state import RequestState

NAMES = ("thinker", "talker", "vocoder")
GIVES = ({"text"}, set(), {"audio"})


def running() -> RequestState:
    walk = {
        name: WalkStage(frozenset(NAMES[max(0, at - 1) : at]), frozenset(NAMES[at + 1 : at + 2]), frozenset(gives))
        for at, (name, gives) in enumerate(zip(NAMES, GIVES, strict=True))
    }
    made = RequestState(Request(request_id="r"), walk, "thinker", ClientQueue(1 << 20))
    made.begin_visits()
    for name, stage in made.stages.items():
        stage.worker, stage.attempt = name, 1
    return made


@pytest.mark.parametrize("order", list(permutations(NAMES)), ids=" ".join)
def test_ids_of_a_stage_that_is_heard_of_last_are_not_lost(order: tuple[str, ...]) -> None:
    """Its chunks reached the one below it by another way, which may be done before it."""
    request = running()
    for count, stage in enumerate(order):
        assert not request.complete()
        assert request.given() == {"thinker", "vocoder"}.issubset(order[:count])
        request.took(Emission("r", stage, 1, units=[count]))
        ends = [OutputEnd(0, "stop")] if stage == "thinker" else []
        request.ended(StageDone(stage, "r", stage, 1, ends, 0.0, 0.0, 0.0))
    assert request.complete()
    finished = request.finished()
    assert finished.token_ids == {stage: [count] for count, stage in enumerate(order)}
    assert {stage for stage, *_ in finished.metrics.spans} == set(NAMES)
