"""Two nodes that lose each other, but not the server: requests go on where the stages reach each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts_system import system

from namespaces import parted

PROMPTS = ("hello", "a longer prompt", "x")
CUT_OFF_WITHIN = 15 + 5
"""`addresses.SILENCE_SECONDS`, until the loss is noticed, and as much as requests then wait for the link."""
LOAD = 10
"""Seconds more that a loaded machine can need."""


@pytest.mark.nightly
def test_nodes_that_lose_each_other_lose_no_answer(toy_dir: Path, tmp_path: Path) -> None:
    deployment = {
        "stages": {"counter": {"node": "node1"}, "tone": {"node": ["node2", "server"], "replicas": 2, "threads": 1}}
    }
    with system(3, toy_dir, deployment, tmp_path) as running:
        running.wait(r"tone\.0-1 \(node2\) is ready")
        running.wait(r"tone\.1-1 is ready")
        right = running.ask(*PROMPTS)
        clients = running.asking(*PROMPTS, seconds=30, parallel=6)
        running.until_answered(clients)
        with parted(running.hosts["node1"], running.hosts["node2"]):
            found = running.answers(clients)
        for one in found:
            assert one["status"] == 200, (one, running.all_logs())
            assert (one["text"], one["audio"]) == right[one["prompt"]]
        assert max(one["seconds"] for one in found) < CUT_OFF_WITHIN + LOAD
        assert running.count("has joined") == 2, "no node was lost"
        running.wait(r"reaches .* again")
        assert running.ask(*PROMPTS) == right


@pytest.mark.nightly
def test_nodes_that_lose_each_other_and_are_the_only_places_give_errors_within_the_stated_time(
    toy_dir: Path, tmp_path: Path
) -> None:
    deployment = {"stages": {"counter": {"node": "node1"}, "tone": {"node": "node2"}}}
    with system(3, toy_dir, deployment, tmp_path) as running:
        right = running.ask(*PROMPTS)
        with parted(running.hosts["node1"], running.hosts["node2"]):
            found = running.answers(running.asking(*PROMPTS, parallel=3))
            assert {one["status"] for one in found} == {503}
            assert all("no connection between node1 and node2" in one["error"] for one in found)
            assert max(one["seconds"] for one in found) < CUT_OFF_WITHIN + LOAD
        running.wait(r"reaches .* again")
        assert running.ask(*PROMPTS) == right
