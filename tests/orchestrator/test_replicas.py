"""The workers by name: a name finds the incarnation that bears it, and no other, whatever is added and removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.orchestrator.workers.replicas import Replicas

GROUPS = (("llm",), ("tone",))
STEPS = st.lists(st.tuples(st.sampled_from(["spawn", "bury", "move"]), st.integers(0, 9)), max_size=30)


def replicas() -> Replicas:
    graph = StageGraph("two")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("tone", "module", gives={"audio"})
    graph.edge("llm", "tone")
    stages = {"llm": {"replicas": 3}, "tone": {"replicas": 2}}
    plan = load_plan(graph, {"stages": stages}, hardware=Hardware(2, 1 << 34))
    return Replicas(plan.groups, plan.stages)


@given(STEPS)
def test_a_name_finds_its_worker(steps: list[tuple[str, int]]) -> None:
    found = replicas()
    names = {""}
    for what, number in steps:
        replica = found.all[number % len(found.all)]
        if what == "spawn":
            replica.incarnation, replica.buried = replica.incarnation + 1, False
        elif what == "bury":
            replica.buried = True
        elif replica.group in GROUPS and len(found.of_group(replica.group)) > 1:
            found.remove(replica)
            other = GROUPS[replica.group == GROUPS[0]]
            found.add(other, found.free_index(other))
        names.update(one.worker for one in found.all)
        for name in names:
            bearers = [one for one in found.all if one.worker == name and not one.buried]
            assert [*filter(None, [found.by_worker(name)])] == bearers
        assert all(found.in_slot(one.slot) is one for one in found.all)
