"""A model over two hosts whose payloads go by Mooncake: equal answers, also while its master dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts_system import system

from mooncake_master import need_mooncake

pytestmark = pytest.mark.needs("mooncake")
PROMPTS = ("hello", "a longer prompt", "x")
AWAY = {"talker": {"node": "node1"}, "vocoder": {"node": "node1"}}


def over(kind: str, **extra: Any) -> dict[str, Any]:
    """A deployment with the last stages on a second host, and Mooncake wherever an edge joins the two."""
    connectors = {"mooncake": {"name": kind, "extra": {"inline_threshold_bytes": 0, **extra}}}
    edges = [("thinker", "talker"), ("talker", "vocoder")]
    return {
        "defaults": {"threads": 1},
        "stages": AWAY,
        "connectors": connectors,
        "edges": [{"from": source, "to": target, "connector": "mooncake"} for source, target in edges],
    }


STORE = over("MooncakeStoreConnector", host="127.0.0.1", master="10.77.0.1:50051", segment="64MiB", proto="tcp")
ENGINE = over("MooncakeTransferEngineConnector", host="auto", protocol="tcp", memory_pool_size="64MiB")


def test_an_omni_model_over_mooncake_answers_as_on_one_host(tiny_dir: Path, tmp_path: Path) -> None:
    need_mooncake()
    found = []
    for name, deployment in (("one", {"defaults": {"threads": 1}}), ("engine", ENGINE), ("store", STORE)):
        (logs := tmp_path / name).mkdir()
        count = 1 if name == "one" else 2
        with system(count, tiny_dir, deployment, logs, master=name == "store") as running:
            found.append(running.ask(*PROMPTS))
            assert running.count("Mooncake's clients listen on every interface") == (name != "one")
    assert found[0] == found[1] == found[2]


def test_a_master_that_dies_costs_no_answer(tiny_dir: Path, tmp_path: Path) -> None:
    need_mooncake()
    with system(2, tiny_dir, STORE, tmp_path, master=True) as running:
        right = running.ask(*PROMPTS)
        assert running.master is not None
        clients = running.asking(*PROMPTS, seconds=8, parallel=6)
        running.master.kill()
        running.master.start()
        running.master.kill()
        for one in running.answers(clients):
            assert one["status"] == 200, (one, running.all_logs())
            assert (one["text"], one["audio"]) == right[one["prompt"]]
        assert any(running.count("the Mooncake store fails", name) for name in running.hosts), "it was in use"
        running.master.start()
        assert running.ask(*PROMPTS) == right
