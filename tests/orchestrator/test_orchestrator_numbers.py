"""A stage whose steps yield rows of numbers: a killed worker goes on from the journalled numbers, bit for bit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy_system import Gate, System, both, collect, kill, pid_of

pytestmark = pytest.mark.usefixtures("toy_path")


@pytest.fixture(scope="module")
def numbers_system(toy_path: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    from segue_toy.family import make
    from segue_toy.numbers.family import ARCHITECTURE

    system = System(make(tmp_path_factory.mktemp("toy-numbers"), ARCHITECTURE))
    yield system
    system.close()


@pytest.mark.parametrize("at", [1, 4])
def test_numbers_are_the_same_after_a_kill(numbers_system: System, tmp_path: Path, at: int) -> None:
    """kill -9 of the talker between two rows; the output ends by its score."""

    async def body() -> None:
        gate = Gate(tmp_path)
        async with numbers_system.shared() as omni:
            asked = {**both("speak in numbers"), "seed": 7}
            whole = await omni.generate(asked)
            assert whole.audio is not None
            ids = whole.token_ids["talker"]
            assert at + 1 < len(ids) < 60, len(ids)
            assert ids == [0] * (len(ids) - 1) + [1]
            assert float(np.abs(whole.audio.samples).max()) > 0.5
            other = await omni.generate({**asked, "seed": 8})
            assert other.audio is not None
            assert not np.array_equal(other.audio.samples, whole.audio.samples)

            task = asyncio.create_task(collect(omni, {**asked, "options": {"hold": gate.option("talker", at)}}))
            held = await gate.reached()
            await kill(pid_of(omni.health(), "talker"))
            gate.remove()
            os.close(held)
            output = await task
            assert output.metrics.attempts == 2
            assert output.audio is not None
            assert output.audio.samples.tobytes() == whole.audio.samples.tobytes()
            assert output.token_ids == whole.token_ids

    numbers_system.run(body)
