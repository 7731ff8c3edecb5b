"""The server loses one node, or its connections to it, while the nodes still reach each other: no answer is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_system import Hosts, system

from namespaces import connected_ports, dropped, parted

pytestmark = pytest.mark.nightly
PROMPTS = ("hello", "a longer prompt", "x")
LOST_WITHIN = 10
"""`join.LOST_SECONDS`: until the node counts as lost."""
SILENCE = 15 + 1
"""`addresses.SILENCE_SECONDS`, until a single connection counts as lost, and the pause between two looks."""
LOAD = 10
"""Seconds more that a loaded machine can need."""
NODES = ["node1", "node2"]
DEPLOYMENT = {
    "stages": {
        "counter": {"node": NODES, "replicas": 2, "threads": 1},
        "tone": {"node": NODES[::-1], "replicas": 2, "threads": 1},
    }
}


@pytest.fixture(scope="module")
def apart(toy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Both stages that compute on two nodes, none on the server."""
    with system(3, toy_dir, DEPLOYMENT, tmp_path_factory.mktemp("apart")) as running:
        for number, node in enumerate(NODES):
            running.wait(rf"counter\.{number}-1 \({node}\) is ready")
            running.wait(rf"tone\.{1 - number}-1 \({node}\) is ready")
        yield running


def all_right(running: Hosts, right: dict[str, tuple[str, str]], found: list[dict[str, object]]) -> None:
    assert len(found) >= len(PROMPTS)
    for one in found:
        assert one["status"] == 200, (one, running.all_logs())
        assert (one["text"], one["audio"]) == right[str(one["prompt"])]


@pytest.mark.parametrize("seconds", [5, 20, 60])
def test_a_node_that_the_server_loses_is_fenced_and_taken_back(apart: Hosts, seconds: int) -> None:
    """It still reaches the other node, with which its workers share requests."""
    right = apart.ask(*PROMPTS)
    joined, lost = apart.count("has joined"), apart.count("node node1 is lost")
    ready = apart.count(r"counter\.0-\d+ \(node1\) is ready")
    clients = apart.asking(*PROMPTS, seconds=seconds + 5, parallel=6)
    apart.until_answered(clients)
    with parted(apart.hosts["server"], apart.hosts["node1"]):
        began = time.monotonic()
        if seconds > LOST_WITHIN:
            apart.wait("node node1 is lost", lost + 1, seconds=LOST_WITHIN + LOAD)
        time.sleep(max(0, began + seconds - time.monotonic()))  # the outage itself
    found = apart.answers(clients)
    all_right(apart, right, found)
    assert max(float(one["seconds"]) for one in found) < LOST_WITHIN + LOAD  # type: ignore[arg-type]
    if seconds > LOST_WITHIN:
        apart.wait("has joined", joined + 1)
        apart.wait(r"counter\.0-\d+ \(node1\) is ready", ready + 1)
    else:
        assert apart.count("has joined") == joined
    assert apart.ask(*PROMPTS) == right


def test_a_connection_to_a_worker_that_dies_in_silence_costs_its_worker_and_no_answer(apart: Hosts) -> None:
    """All else of its node still reaches the server, and the node stays."""
    right = apart.ask(*PROMPTS)
    joined, lost = apart.count("has joined"), apart.count("the connection to worker")
    ready = apart.count(r"counter\.0-\d+ \(node1\) is ready")
    server, node = apart.hosts["server"], apart.hosts["node1"]
    clients = apart.asking(*PROMPTS, seconds=SILENCE + LOAD, parallel=6)
    apart.until_answered(clients)
    ports = connected_ports(server, node, apart.running["server"].pid)
    assert ports, "one for each worker there"
    with dropped(server, node, ports):
        apart.wait("the connection to worker", lost + 1, seconds=SILENCE + LOAD)
        found = apart.answers(clients)
    all_right(apart, right, found)
    assert max(float(one["seconds"]) for one in found) < SILENCE + LOAD  # type: ignore[arg-type]
    apart.wait(r"counter\.0-\d+ \(node1\) is ready", ready + 1)
    assert apart.count("has joined") == joined, "no node was lost"
    assert apart.ask(*PROMPTS) == right
