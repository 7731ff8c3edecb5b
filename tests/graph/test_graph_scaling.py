"""A range of replicas: what the file says of it, what is planned for it, and how mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from segue.graph.deployment.deployment import Plan
from segue.graph.deployment.stage_plan import Scaling
from segue.graph.render import as_text
from segue.messages.errors import ConfigError

Lay = Callable[..., Plan]
RANGE = {"min": 2, "max": 4, "queue_age": 3}


def test_a_range_begins_with_its_least(plan: Lay) -> None:
    made = plan({"stages": {"vocoder": {"replicas": {**RANGE, "idle": 20, "cooldown": 5}}}})
    vocoder = made.stages["vocoder"]
    assert vocoder.scaling == Scaling(2, 4, 3.0, 20.0, 5.0)
    assert vocoder.replicas == 2
    assert made.stages["talker"].scaling is None
    assert "2 to 4" in as_text(made)
    assert plan({"stages": {"vocoder": {"replicas": {"max": 4, "queue_age": 3}}}}).stages["vocoder"].scaling == Scaling(
        1, 4, 3.0
    )


def test_defaults_give_every_stage_with_a_network_a_range(plan: Lay) -> None:
    made = plan({"defaults": {"replicas": RANGE}})
    assert {name for name, stage in made.stages.items() if stage.scaling is None} == {"input", "output"}


def test_it_may_begin_with_fewer_replicas_than_devices(plan: Lay) -> None:
    made = plan({"stages": {"talker": {"devices": ["cuda:0", "cuda:1"], "replicas": {"max": 2, "queue_age": 1}}}})
    assert made.stages["talker"].replicas == 1
    assert [made.stages["talker"].device_of(index) for index in (0, 1)] == ["cuda:0", "cuda:1"]


def test_shares_that_nobody_set_have_room_for_all_replicas_and_those_that_are_set_for_the_first(plan: Lay) -> None:
    one = {"devices": "cuda:0", "replicas": {"max": 4, "queue_age": 1}}
    alone = plan({"stages": {"encoder": {"devices": "cuda:1"}, "thinker": {"devices": "cuda:1"}, "talker": one}})
    on_it = [stage for stage in alone.stages.values() if stage.devices == ("cuda:0",)]
    assert sum(stage.memory_share * (4 if stage.scaling else 1) for stage in on_it) <= 0.9 + 1e-9
    said = plan({"stages": {"talker": {**one, "memory_share": 0.4}}})
    assert said.stages["talker"].memory_share == 0.4, "as many as fit are started"


def test_stages_of_one_worker_have_one_range(fused_graph: Any, plan: Lay) -> None:
    made = plan({"stages": {"thinker": {"replicas": RANGE}}}, graph=fused_graph)
    assert made.stages["encoder"].scaling == made.stages["thinker"].scaling == Scaling(2, 4, 3.0)
    stages = {"thinker": {"replicas": RANGE}, "encoder": {"replicas": {**RANGE, "max": 5}, "fuse_with": "thinker"}}
    with pytest.raises(ConfigError, match=r"'encoder' has replicas \{min: 2, max: 5, .* they must agree"):
        plan({"stages": stages}, graph=fused_graph)


@pytest.mark.parametrize(
    ("stage", "replicas", "field", "said"),
    [
        ("talker", {"max": 2}, "stages.talker.replicas.queue_age", "a range needs max and queue_age"),
        ("talker", {"min": 1, "queue_age": 2}, "stages.talker.replicas.max", "a range needs max and queue_age"),
        ("talker", {**RANGE, "max": 1}, "stages.talker.replicas.max", "1; it must be an integer of at least 2"),
        ("talker", {**RANGE, "min": 0}, "stages.talker.replicas.min", "0; it must be an integer of at least 1"),
        ("talker", {**RANGE, "queue_age": 0}, "stages.talker.replicas.queue_age", "0; it must be a number above 0"),
        ("talker", {**RANGE, "idel": 3}, "stages.talker.replicas.idel", "no key 'idel'; did you mean 'idle'"),
        ("talker", "two", "stages.talker.replicas", "'two'; it must be an integer of at least 1"),
        ("input", RANGE, "stages.input.replicas", "a number: the workers of the input stage are always the same"),
    ],
)
def test_mistakes_in_a_range_are_named(plan: Lay, stage: str, replicas: Any, field: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        plan({"stages": {stage: {"replicas": replicas}}})
    assert caught.value.field == field


def test_a_range_that_is_less_than_its_devices_is_refused(plan: Lay) -> None:
    stage = {"devices": ["cuda:0", "cuda:1"], "replicas": {"max": 1, "queue_age": 1}}
    with pytest.raises(ConfigError, match="at least 2, the number of its devices") as caught:
        plan({"stages": {"talker": stage}})
    assert caught.value.field == "stages.talker.replicas.max"
