"""A stage whose steps yield rows of codes: the journal holds whole rows, and a killed worker goes on from them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy_system import Gate, System, both, collect, kill, pid_of

from segue.messages.wire import Emission
from segue.orchestrator.omni.outputs import RequestOutput
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.requests.request_state import RequestState, StageState

pytestmark = pytest.mark.usefixtures("toy_path")


@pytest.fixture(scope="module")
def rows_system(toy_path: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    from segue_toy.family import make
    from segue_toy.rows.family import ARCHITECTURE

    system = System(make(tmp_path_factory.mktemp("toy-rows"), ARCHITECTURE))
    yield system
    system.close()


def rows_of(output: RequestOutput) -> np.ndarray:
    """The rows that the vocoder received, [n, 3]."""
    from segue_toy.rows.stages import CODES
    from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB

    assert output.audio is not None
    assert len(output.audio.samples) % SAMPLES_PER_TOKEN == 0
    values = output.audio.samples.reshape(-1, SAMPLES_PER_TOKEN)
    assert (values == values[:, :1]).all()
    numbers = np.rint(values[:, 0].astype(np.float64) * VOCAB * CODES * CODES).astype(int)
    return np.stack([numbers // CODES**2, numbers // CODES % CODES, numbers % CODES], axis=1)


@pytest.mark.parametrize("at", [1, 9, 23])
def test_rows_are_the_same_after_a_kill(rows_system: System, tmp_path: Path, at: int) -> None:
    """kill -9 of the talker between two rows: the same rows, nothing twice."""

    async def body() -> None:
        gate = Gate(tmp_path)
        async with rows_system.shared() as omni:
            asked = {**both("speak in rows"), "seed": 7}
            whole = await omni.generate(asked)
            rows = rows_of(whole)
            assert rows[:, 0].tolist() == whole.token_ids["talker"]
            assert len(np.unique(rows[:, 1:], axis=0)) > 12
            other = rows_of(await omni.generate({**asked, "seed": 8}))
            assert not np.array_equal(other, rows)

            task = asyncio.create_task(collect(omni, {**asked, "options": {"hold": gate.option("talker", at)}}))
            held = await gate.reached()
            await kill(pid_of(omni.health(), "talker"))
            gate.remove()
            os.close(held)
            output = await task
            assert output.metrics.attempts == 2
            np.testing.assert_array_equal(rows_of(output), rows)
            assert output.token_ids == whole.token_ids
            assert output.usage.completion_modalities["audio"] == len(rows)

    rows_system.run(body)


def test_the_journal_keeps_whole_rows_once() -> None:
    from segue.graph.walk import WalkStage
    from segue.messages.request import Request

    walk = {"talker": WalkStage(frozenset(), frozenset(), frozenset({"audio"}))}
    state = RequestState(Request(request_id="r"), walk, "talker", ClientQueue(1 << 20))
    state.stages = {"talker": StageState((), (), worker="talker", attempt=1)}
    state.took(Emission("r", "talker", 1, units=[[1, 5], [2, 6]]))
    state.took(Emission("r", "talker", 1, units=[[1, 5]]))  # a new attempt emits what it resumed from
    state.took(Emission("r", "talker", 1, units=[[2, 6], [3, 7]], first_index=1))
    assert state.resume("talker") == [[[1, 5], [2, 6], [3, 7]]]
    assert state.finished().token_ids == {"talker": [1, 2, 3]}
