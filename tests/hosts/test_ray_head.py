"""Ray's head is killed: errors come in time, nothing is left, and all goes on when it is back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts_system import STARTED, system

from namespaces import processes

pytestmark = pytest.mark.needs("ray")
PROMPTS = ("hello", "a longer prompt", "x")
WITHIN = 10 + 15
"""`join.LOST_SECONDS`, and as much as a loaded machine and a worker's restart can need."""
AWAY = {"num_cpus": 0, "resources": {"talkers": 1}, "model": "/elsewhere"}


def deployment(**stages: Any) -> dict[str, Any]:
    return {"placement": "ray", "ray": {"address": "10.77.0.1:6379", "nodes": {"away": AWAY}}, "stages": stages}


def test_a_killed_head_gives_errors_in_time_and_its_nodes_come_back_with_it(toy_dir: Path, tmp_path: Path) -> None:
    """A stage that only Ray's node has."""
    with system(2, toy_dir, deployment(tone={"node": "away"}), tmp_path, ray=True) as running:
        assert running.ray is not None
        right = running.ask(*PROMPTS)
        clients = running.asking(*PROMPTS, seconds=WITHIN, parallel=4)
        running.until_answered(clients)
        running.ray.kill(0)
        running.wait("what keeps nodes in the Ray cluster ended")
        for one in running.answers(clients):
            assert one["seconds"] < WITHIN, (one, running.all_logs())
            if one["status"] == 200:
                assert (one["text"], one["audio"]) == right[one["prompt"]]
            else:
                assert one["status"] == 503
                assert "'tone'" in one["error"]
        running.ray.kill(1)  # it belongs to a cluster that is no more
        running.until_none(rf"{STARTED}tone|ray::RayAgent")
        joined = running.count("has joined")
        running.ray.start(0)
        running.ray.start(1)
        running.wait(r"node away \(10\.77\.0\.2\) has joined", joined + 1)
        running.wait(r"tone\.0-[2-9]\d* \(away\) is ready")
        assert running.ask(*PROMPTS) == right
        drivers = [one for one in processes(running.hosts["server"]) if "ray_driver" in one]
        assert len(drivers) == 1
