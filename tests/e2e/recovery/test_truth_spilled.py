"""Every payload through the pool of shared memory, none of it retained in memory: what recovery needs is in files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from truth_system import CASES, LONG, LONG_MIXED, Case, System, Truth

from segue.messages.deltas import AudioDelta, Delta
from segue.orchestrator.omni.outputs import RequestOutput

pytestmark = pytest.mark.nightly  # test_orchestrator_edges

DEPLOYMENT = {
    "stages": {"encoder": {"fuse_with": None}},
    "limits": {"retained_bytes": 1},
    "runtime": {"connectors": {"shm": {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": 1}}}},
}


def spilled(system: System, stage: str) -> list[str]:
    """Unlinked files of a stage's worker in the runtime directory."""
    links = []
    for link in Path(f"/proc/{system.pid(stage)}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            links.append(os.readlink(link))
    return [link for link in links if link.startswith(system.omni.orchestrator.runtime_dir) and "(deleted)" in link]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_alone(system: System, truth: Truth, assets: Path, case: Case) -> None:
    [output] = system.ask(case.prompt(assets))
    truth.check(output, case)


@pytest.mark.parametrize("case", [LONG, LONG_MIXED], ids=lambda case: case.name)
@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
def test_killed_and_run_again_from_the_file(system: System, truth: Truth, assets: Path, stage: str, case: Case) -> None:
    upstream = {"thinker": "input", "talker": "thinker", "vocoder": "talker"}[stage]

    async def body() -> tuple[RequestOutput, bool]:
        seen: list[list[str]] = []

        def kill(delta: Delta) -> None:
            # the first words may reach the client before the talker's share of them is written
            heard = isinstance(delta, AudioDelta) or stage != "vocoder"
            if not seen and heard and (files := spilled(system, upstream)):
                seen.append(files)
                system.kill(stage)

        output = await system.collect(case.prompt(assets), kill)
        truth.check(output, case)
        return output, bool(seen)

    output, seen = system.in_time(body, lambda found: found[0].metrics.attempts > 1)
    assert seen, "nothing was written"
    assert output.metrics.attempts == 2
