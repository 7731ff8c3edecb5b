"""Nodes that a Ray cluster starts: equal answers, and what becomes of them when Ray's hosts or its head are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts_system import system

pytestmark = pytest.mark.needs("ray")
PROMPTS = ("hello", "a longer prompt", "x")
TALKERS = {"num_cpus": 0, "resources": {"talkers": 1}, "model": "/elsewhere"}


def deployment(**nodes: object) -> dict[str, object]:
    return {
        "placement": "ray",
        "ray": {"address": "10.77.0.1:6379", "nodes": nodes},
        "stages": {"tone": {"node": ["server", *nodes], "replicas": 1 + len(nodes), "threads": 1}},
    }


def test_a_host_that_is_killed_costs_no_answer_and_its_node_comes_back(toy_dir: Path, tmp_path: Path) -> None:
    with system(2, toy_dir, deployment(away=TALKERS), tmp_path, ray=True) as running:
        assert running.ray is not None
        running.wait(r"tone\.1-\d+ \(away\) is ready")
        right = running.ask(*PROMPTS)
        clients = running.asking(*PROMPTS, seconds=4, parallel=4)
        running.ray.kill(1)
        for one in running.answers(clients):
            assert one["status"] == 200, (one, running.all_logs())
            assert (one["text"], one["audio"]) == right[one["prompt"]]
        running.wait("node away is lost")
        running.ray.start(1)
        running.wait(r"node away \(10\.77\.0\.2\) has joined", 2)
        running.wait(r"tone\.1-\d+ \(away\) is ready", 2)
        assert running.ask(*PROMPTS) == right


def test_a_node_comes_while_requests_wait_and_is_given_back(toy_dir: Path, tmp_path: Path) -> None:
    replicas = {"min": 1, "max": 2, "queue_age": 0.02, "idle": 3, "cooldown": 0.5}
    counter = {"node": ["server", "away"], "replicas": replicas, "max_batch": 1, "threads": 1}
    deployed = {**deployment(away=TALKERS), "stages": {"counter": counter}}
    with system(2, toy_dir, deployed, tmp_path, ray=True) as one:
        right = one.ask(*PROMPTS)
        assert one.count("has joined") == 0, "nobody waits"
        for times in (1, 2):
            clients = one.asking(*PROMPTS, seconds=30, parallel=16)
            one.wait(r"counter\.1-\d+ \(away\) is ready", times)
            for answer in one.answers(clients):
                assert answer["status"] == 200, (answer, one.all_logs())
                assert (answer["text"], answer["audio"]) == right[answer["prompt"]]
            one.wait("node away is given back to the Ray cluster", times)
            assert one.ask(*PROMPTS) == right
        assert one.count("node away is lost") == 0
