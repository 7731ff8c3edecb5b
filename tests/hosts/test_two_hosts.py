"""Stages on two and three hosts: equal answers; whatever dies or is cut off on the second one, no answer is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_system import Hosts, system

from namespaces import cut, mend, need_namespaces

PROMPTS = ("hello", "a longer prompt", "x")
LOST_WITHIN = 10 + 5
"""`join.LOST_SECONDS`, and as much for a loaded machine as a beat and an answer can need."""
SPREAD = {"stages": {"tone": {"node": ["server", "node1"], "replicas": 2, "threads": 1}}}
ALONE = {"stages": {"tone": {"node": "node1"}}}


@pytest.fixture(scope="module")
def spread(toy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """The last stage on both hosts."""
    with system(2, toy_dir, SPREAD, tmp_path_factory.mktemp("spread")) as running:
        running.wait(r"tone\.1-1 \(node1\) is ready")
        yield running


def all_right(running: Hosts, right: dict[str, tuple[str, str]], found: list[dict[str, object]]) -> None:
    assert len(found) >= len(PROMPTS)
    for one in found:
        assert one["status"] == 200, (one, running.all_logs())
        assert (one["text"], one["audio"]) == right[str(one["prompt"])]


def test_a_killed_worker_of_another_host_costs_no_answer(spread: Hosts) -> None:
    right = spread.ask(*PROMPTS)
    ready = spread.count(r"tone\.1-\d+ \(node1\) is ready")
    clients = spread.asking(*PROMPTS, seconds=4, parallel=6)
    spread.processes("node1")["segue-tone.1-1"].kill()
    all_right(spread, right, spread.answers(clients))
    spread.wait(r"tone\.1-\d+ \(node1\) is ready", ready + 1)
    assert spread.ask(*PROMPTS) == right


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["forks", "agent"])
def test_a_node_that_dies_costs_no_answer(spread: Hosts, victim: str) -> None:
    right = spread.ask(*PROMPTS)
    joined, ready = spread.count("has joined"), spread.count(r"tone\.1-\d+ \(node1\) is ready")
    clients = spread.asking(*PROMPTS, seconds=15, parallel=6)
    workers = [process for name, process in spread.processes("node1").items() if name.startswith("segue-")]
    spread.processes("node1")[victim].kill()
    if victim == "agent":
        spread.running["node1"].wait(10)
        spread.join("node1")
    all_right(spread, right, spread.answers(clients))
    assert not any(process.is_running() for process in workers), "no worker outlives its agent"
    spread.wait("has joined", joined + 1)
    spread.wait(r"tone\.1-\d+ \(node1\) is ready", ready + 1)
    assert spread.ask(*PROMPTS) == right


@pytest.mark.nightly
def test_a_killed_fork_server_of_the_server_costs_no_answer_and_no_node(spread: Hosts) -> None:
    right = spread.ask(*PROMPTS)
    joined, ready = spread.count("has joined"), spread.count(r"counter\.0-\d+ \(server\) is ready")
    worker = next(worker for name, worker in spread.processes("node1").items() if name.startswith("segue-tone"))
    clients = spread.asking(*PROMPTS, seconds=4, parallel=6)
    spread.until_answered(clients)
    spread.processes("server")["forks"].kill()
    all_right(spread, right, spread.answers(clients))
    spread.wait(r"counter\.0-\d+ \(server\) is ready", ready + 1)
    assert worker.is_running()
    assert spread.count("has joined") == joined
    assert spread.ask(*PROMPTS) == right


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [5, 20])
def test_a_link_that_is_down_for_a_while_costs_no_answer(spread: Hosts, seconds: int) -> None:
    """5 s: nothing is lost and nobody restarted. 20 s: the node is taken for lost, and fenced when it comes back."""
    right = spread.ask(*PROMPTS)
    joined, ready = spread.count("has joined"), spread.count(r"tone\.1-\d+ \(node1\) is ready")
    clients = spread.asking(*PROMPTS, seconds=seconds + 5, parallel=6)
    cut(spread.hosts["node1"])
    try:
        time.sleep(seconds)  # the outage itself
    finally:
        mend(spread.hosts["node1"])
    all_right(spread, right, spread.answers(clients))
    if seconds > LOST_WITHIN:
        spread.wait("has joined", joined + 1)
        spread.wait(r"tone\.1-\d+ \(node1\) is ready", ready + 1)
    else:
        assert spread.count("has joined") == joined
    assert spread.ask(*PROMPTS) == right


@pytest.mark.nightly
def test_a_lost_node_that_was_the_only_place_gives_errors_within_the_stated_time(toy_dir: Path, tmp_path: Path) -> None:
    with system(2, toy_dir, ALONE, tmp_path) as running:
        right = running.ask(*PROMPTS)
        cut(running.hosts["node1"])
        found = running.answers(running.asking("hello", "x", seconds=LOST_WITHIN + 2))
        assert {one["status"] for one in found} == {503}
        assert all("'tone'" in one["error"] for one in found)
        assert max(one["seconds"] for one in found) <= LOST_WITHIN
        mend(running.hosts["node1"])
        running.wait("has joined", 2)
        running.wait(r"tone\.0-[2-9] \(node1\) is ready")
        assert running.ask(*PROMPTS) == right


@pytest.mark.nightly
def test_nodes_send_to_each_other_without_the_server(toy_dir: Path, tmp_path: Path) -> None:
    deployment = {"stages": {"counter": {"node": "node1"}, "tone": {"node": "node2"}}}
    with system(3, toy_dir, deployment, tmp_path) as running:
        assert len(running.ask(*PROMPTS)) == len(PROMPTS)


@pytest.mark.nightly
def test_an_omni_model_over_two_hosts_answers_as_on_one(tiny_dir: Path, tmp_path: Path) -> None:
    found = []
    tcp = {"runtime": {"connectors": {"tcp": {"name": "TcpConnector", "extra": {"inline_threshold_bytes": 0}}}}}
    away = {"talker": {"node": "node1"}, "vocoder": {"node": "node1"}}
    for number, stages in enumerate([{}, away]):
        (logs := tmp_path / str(number)).mkdir()
        deployment = {"defaults": {"threads": 1}, "stages": stages, **(tcp if stages else {})}
        with system(1 + bool(stages), tiny_dir, deployment, logs) as running:
            found.append(running.ask(*PROMPTS))
    assert found[0] == found[1]


def test_a_node_that_the_deployment_does_not_name_is_told_so(spread: Hosts, tmp_path: Path) -> None:
    host = spread.hosts["node1"]
    log = tmp_path / "log"
    words = ("-m", "segue.cli", "join", spread.hosts["server"].address, "--name", "node7")
    process = host.start(*words, log=log, SEGUE_JOIN_TOKEN="a token of the tests")
    assert process.wait(60) == 2
    assert "has no node 'node7'" in log.read_text()


def test_a_wrong_token_opens_nothing(spread: Hosts, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ("-m", "segue.cli", "join", spread.hosts["server"].address, "--name", "node1", "--token", "guessed" * 4)
    process = spread.hosts["node1"].start(*words, log=log)
    try:
        end = time.monotonic() + 60
        while "is this its token?" not in log.read_text():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


def test_namespaces_can_be_made_where_ci_runs() -> None:
    need_namespaces()
