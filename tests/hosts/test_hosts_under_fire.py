"""20 mixed requests on two hosts while something fails: each answer equals that of the undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from hosts_system import Hosts, system
from mixed_requests import COUNT, Answers, Clients, assert_equal

from namespaces import cut, mend, narrow, slow
from segue.bench.harness.namespaces import Host

pytestmark = pytest.mark.nightly
BOTH = {"node": ["node1", "server"], "replicas": 2, "threads": 1}
DEPLOYMENT = {
    "defaults": {"threads": 1},
    "stages": {"thinker": BOTH, "talker": BOTH, "vocoder": BOTH},
    "runtime": {"connectors": {"tcp": {"name": "TcpConnector", "extra": {"inline_threshold_bytes": 0}}}},
}


@pytest.fixture(scope="module")
def omni(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A tiny Qwen2.5-Omni: every stage that computes has a replica on either host, and payloads go over TCP."""
    with system(2, tiny_dir, DEPLOYMENT, tmp_path_factory.mktemp("omni")) as running:
        all_are_ready(running, 1)
        yield running


@pytest.fixture(scope="module")
def undisturbed(omni: Hosts) -> Answers:
    right = Clients(omni).answers()
    assert all((number % 2 == 1) == (len(one.samples) > 1000) for number, one in right.items())
    assert len({one.text for one in right.values()}) > COUNT / 2
    return right


def all_are_ready(omni: Hosts, times: int) -> None:
    for stage in ("thinker", "talker", "vocoder"):
        omni.wait(rf"{stage}\.0-\d+ \(node1\) is ready", times)


@pytest.mark.parametrize("host", ["node1", "server"])
def test_killed_workers_change_no_answer(omni: Hosts, undisturbed: Answers, host: str) -> None:
    """One of each stage, one after the other, while requests go on."""
    clients = Clients(omni)
    clients.until_begun(1)
    for stage in ("vocoder", "thinker", "talker"):
        workers = omni.processes(host)
        name = next(name for name in workers if name.startswith(f"segue-{stage}"))
        workers[name].kill()
        clients.until_begun(2)
    assert_equal(clients.answers(), undisturbed)


@pytest.mark.parametrize("victim", ["forks", "agent"])
def test_a_killed_node_changes_no_answer(omni: Hosts, undisturbed: Answers, victim: str) -> None:
    ready = omni.count(r"vocoder\.0-\d+ \(node1\) is ready")
    clients = Clients(omni)
    clients.until_begun(3)
    omni.processes("node1")[victim].kill()
    if victim == "agent":
        omni.running["node1"].wait(30)
        omni.join("node1")
    assert_equal(clients.answers(), undisturbed)
    omni.wait(r"vocoder\.0-\d+ \(node1\) is ready", ready + 1)


@pytest.mark.parametrize("seconds", [5, 20])
def test_a_link_that_goes_down_and_up_changes_no_answer(omni: Hosts, undisturbed: Answers, seconds: int) -> None:
    """In the middle of streams; for longer than a node may be silent, or not."""
    joined = omni.count("has joined")
    clients = Clients(omni)
    clients.until_begun(3)
    cut(omni.hosts["node1"])
    try:
        time.sleep(seconds)  # the outage itself
    finally:
        mend(omni.hosts["node1"])
    assert_equal(clients.answers(), undisturbed)
    omni.wait("has joined", joined + (seconds > 10))


BAD_NETWORKS: dict[str, Callable[[Host], AbstractContextManager[None]]] = {
    "5% loss": lambda host: slow(host, 0.0, 0.05),
    "50 ms delay": lambda host: slow(host, 0.05, 0.0),
    "10 Mbit/s": lambda host: narrow(host, "10mbit"),
}


@pytest.mark.parametrize("kind", BAD_NETWORKS)
def test_a_bad_network_changes_no_answer(omni: Hosts, undisturbed: Answers, kind: str) -> None:
    joined = omni.count("has joined")
    with ExitStack() as network:
        network.enter_context(BAD_NETWORKS[kind](omni.hosts["node1"]))
        assert_equal(Clients(omni).answers(), undisturbed)
    assert omni.count("has joined") == joined, "no node was lost"
