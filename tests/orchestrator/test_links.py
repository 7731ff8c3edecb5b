"""Nodes that cannot reach each other: requests are placed where their stages can, and only what is affected moves."""

from __future__ import annotations

from itertools import combinations, pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.request import Request
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.requests.request_state import RequestState, StageState, stages_across
from segue.orchestrator.workers.nodes.links import Links
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.router import Router, Unplaced

NODES = ("server", "node1", "node2")
NAMES = (INPUT, "a", "b", "c")
pairs = list(combinations(NODES, 2))


def chain_of_four() -> tuple[Plan, Replicas]:
    """input → a → b → c, three ready replicas of each."""
    graph = StageGraph("chain")
    graph.stage("a", "module", takes={"text"})
    graph.stage("b", "module")
    graph.stage("c", "module", gives={"audio"})
    graph.edge("a", "b")
    graph.edge("b", "c")
    stages = {name: {"replicas": 3} for name in NAMES}
    plan = load_plan(graph, {"stages": stages}, hardware=Hardware(2, 1 << 34))
    replicas = Replicas(plan.groups, plan.stages)
    for replica in replicas.all:
        replica.incarnation, replica.state, replica.address = 1, "ready", f"ipc://{replica.worker}"
    return plan, replicas


def books(workers: dict[str, str]) -> dict[str, StageState]:
    """A request on these workers; stages without one have not begun."""
    ups = {name: NAMES[max(0, at - 1) : at] for at, name in enumerate(NAMES)}
    downs = {name: NAMES[at + 1 : at + 2] for at, name in enumerate(NAMES)}
    return {name: StageState(ups[name], downs[name], worker=workers.get(name, "")) for name in NAMES}


@given(
    st.fixed_dictionaries({name: st.lists(st.sampled_from(NODES), min_size=3, max_size=3) for name in NAMES}),
    st.sets(st.sampled_from(pairs), min_size=1),
    st.sets(st.sampled_from(NAMES), min_size=1),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2)),
    st.data(),
)
def test_a_request_is_placed_where_its_stages_reach_each_other_if_there_is_such_a_place(
    nodes: dict[str, list[str]],
    cut: set[tuple[str, str]],
    waiting: set[str],
    running: dict[str, int],
    data: st.DataObject,
) -> None:
    """Against trying every combination."""
    plan, replicas = chain_of_four()
    router = Router(plan, replicas, {}, {})
    links = router.links
    of = {name: replicas.of_group((name,)) for name in NAMES}
    for name, workers in of.items():
        for replica, node in zip(workers, nodes[name], strict=True):
            replica.node = node
    for number, (one, other) in enumerate(cut):
        links.lost(Replica(("x",), number, one, 1), Replica(("y",), number, other, 1))
    state = RequestState(Request(request_id="r", prompt=""), {}, "c", ClientQueue(1))
    state.stages = books({name: of[name][at].worker for name, at in running.items()})
    state.waiting = waiting | (set(NAMES) - running.keys())

    def connected(chosen: dict[str, Replica]) -> bool:
        used = {**{name: of[name][at] for name, at in running.items()}, **chosen}
        edges = [(up, down) for up, down in pairwise(NAMES) if {up, down} & state.waiting]
        return not any(links.cut(used[up].node, used[down].node) for up, down in edges)

    every = (dict(zip(state.waiting, choice, strict=True)) for choice in product(*(of[name] for name in state.waiting)))
    placed = router.place(state)
    if isinstance(placed, Unplaced):
        assert placed.cut
        assert not any(map(connected, every))
    else:
        assert connected({group[0]: replica for group, replica in placed.items()})


def test_only_what_has_yet_to_come_over_a_lost_link_is_affected() -> None:
    stages = books({name: name for name in NAMES})
    for name, node in {INPUT: "server", "a": "node1", "b": "node2", "c": "node2"}.items():
        stages[name].address = f"{node} ipc:///{name} tcp://{name}:1"
    assert stages_across(stages, {"node1", "node2"}) == {"a", "b"}
    assert stages_across(stages, {"server", "node2"}) == set()
    stages["b"].inputs_done.add("a")
    assert stages_across(stages, {"node1", "node2"}) == set()
    stages["a"].done = True
    assert stages_across(stages, {"server", "node1"}) == set()


def test_a_link_is_whole_when_every_lost_connection_is_back_or_its_worker_dead() -> None:
    links = Links()
    a, b, c = Replica(("a",), 0, "node1", 1), Replica(("b",), 0, "node2", 1), Replica(("c",), 0, "node2", 1)
    links.lost(a, b)
    links.lost(b, a)
    links.lost(c, a)
    links.back(a, b)
    assert links.cut("node2", "node1")
    links.keep({a.worker, c.worker})
    assert links.cut("node1", "node2")
    assert not links.cut("node1", "server")
    assert links.names() == "node1 and node2"
    links.back(c, a)
    assert links.whole()
