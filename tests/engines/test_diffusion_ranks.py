"""A leader and a follower of a denoiser without a model, in two threads: what fails in one, and who hears of it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_fakes import Ask, FakeDenoiser, truth

from segue.engines.contract import StageOutput
from segue.engines.diffusion.contract import Row
from segue.engines.diffusion.engine import DiffusionEngine
from segue.engines.diffusion.ranks import RowLeader
from segue.engines.diffusion.row_follower import follow_rows
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed
from segue.parallel.group import Group, ReplicaBroken
from segue.parallel.orders import Crew

CPU = torch.device("cpu")
ASKS = (Ask("plain", calls=2), Ask("guided", calls=3, guided=True, outputs=2))


class Follower(threading.Thread):
    """`broken`: what it ended with."""

    def __init__(self, fake: FakeDenoiser, orders: socket.socket, meeting: Path, *, divided: bool) -> None:
        super().__init__()
        self.broken: BaseException | None = None
        self._given = (fake, orders, meeting, divided)

    def run(self) -> None:
        fake, orders, meeting, divided = self._given
        try:
            follow_rows(fake, Group(1, 2, meeting, CPU), orders, divided=divided)
        except BaseException as error:
            self.broken = error
        orders.close()


@contextmanager
def pair(here: FakeDenoiser, there: FakeDenoiser, meeting: Path, *, divided: bool) -> Iterator[RowLeader]:
    for fake in (here, there):
        fake.asks.update({ask.name: ask for ask in ASKS})
    near, far = socket.socketpair()
    follower = Follower(there, far, meeting, divided=divided)
    follower.start()
    crew = Crew([near])
    leader = RowLeader(here, Group(0, 2, meeting, CPU), crew, divided=divided)
    try:
        yield leader
    finally:
        crew.close()
        follower.join()


def made(engine: DiffusionEngine, *asks: Ask) -> list[StageOutput]:
    for ask in asks:
        engine.add(ask.request())
        engine.feed(ask.name, "input", {}, final=True)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def assert_true(outputs: Sequence[StageOutput], asks: Sequence[Ask]) -> None:
    done = {(one.request_id, one.index): one.payload["latents"] for one in outputs if one.payload}
    assert set(done) == {(ask.name, index) for ask in asks for index in range(ask.outputs)}
    for ask in asks:
        for index in range(ask.outputs):
            torch.testing.assert_close(done[ask.name, index], truth(ask, index), rtol=0, atol=1e-5)


@pytest.mark.parametrize("divided", [False, True])
def test_two_equal_one(divided: bool, tmp_path: Path) -> None:
    here, there = FakeDenoiser(), FakeDenoiser()
    with pair(here, there, tmp_path / "meeting", divided=divided) as leader:
        assert_true(made(DiffusionEngine(leader), *ASKS), ASKS)
    assert sum(map(len, there.calls)) == (2 + 6 + 6 if divided else 6), "all rows, or those of the second branch"
    assert set(there.ended) == {"plain", "guided"}


@pytest.mark.parametrize("divided", [False, True])
def test_what_a_follower_cannot_prepare_is_logged_there_and_told(
    divided: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = FakeDenoiser()
    with pair(FakeDenoiser(), there, tmp_path / "meeting", divided=divided) as leader:
        del there.asks["guided"]
        leader.serve()
        engine = DiffusionEngine(leader)
        if divided:
            with pytest.raises(ReplicaBroken, match="rank 0: None, rank 1: StageFailed: request guided could not be"):
                made(engine, ASKS[1])
        else:
            [failed] = [one for one in made(engine, ASKS[1]) if one.error is not None]
            assert isinstance(failed.error, StageFailed)
            assert "rank 1 could not compute its rows; its log says why" in failed.error.message
            assert_true(made(engine, ASKS[0]), ASKS[:1])
    [said] = [record for record in caplog.records if "cannot prepare request guided" in record.message]
    assert said.levelno == logging.ERROR
    assert said.exc_info is not None
    assert isinstance(said.exc_info[1], KeyError)


def refused(rows: Sequence[Row]) -> Exception | None:
    return InvalidRequest("too short", field="prompt") if rows[0].sample.request_id == "guided" else None


def test_what_all_ranks_refuse_is_the_failure_of_that_request(tmp_path: Path) -> None:
    with pair(FakeDenoiser(fails=refused), FakeDenoiser(fails=refused), tmp_path / "meeting", divided=True) as leader:
        leader.serve()
        engine = DiffusionEngine(leader)
        [failed] = [one for one in made(engine, ASKS[1]) if one.error is not None]
        assert isinstance(failed.error, InvalidRequest)
        assert_true(made(engine, ASKS[0]), ASKS[:1])


def test_memory_that_is_over_in_a_divided_network_ends_the_replica(tmp_path: Path) -> None:
    """Others may be further on: nobody knows what they wait for."""

    def full(rows: Sequence[Row]) -> Exception | None:
        return torch.OutOfMemoryError("over")

    with pair(FakeDenoiser(fails=full), FakeDenoiser(fails=full), tmp_path / "meeting", divided=True) as leader:
        engine = DiffusionEngine(leader)
        with pytest.raises(
            ConfigError, match=r"a call of the warm-up together: rank 0: OutOfMemoryError: over, rank 1"
        ):
            leader.predict([Row(sample, 0) for sample in given(leader)])
        leader.serve()
        with pytest.raises(ReplicaBroken, match="out of step"):
            made(engine, ASKS[0])


def given(leader: RowLeader) -> Sequence[Any]:
    request = ASKS[1].request()
    return leader.feed(leader.begin(request), "input", {}, final=True)


def test_both_measure_the_same_trials(tmp_path: Path) -> None:
    here, there = FakeDenoiser(made_up=(4, 16)), FakeDenoiser(made_up=(4, 16))
    with pair(here, there, tmp_path / "meeting", divided=True) as leader:
        engine = DiffusionEngine(leader)
        engine.warm_up()
        assert engine.costs.per_row
    assert here.calls == there.calls


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    with pair(FakeDenoiser(), FakeDenoiser(), tmp_path / "meeting", divided=False) as leader:
        engine = DiffusionEngine(leader)
        engine.add(ASKS[0].request())
        engine.feed("plain", "input", {"odd": object()}, final=True)
        [failed] = engine.step()
    assert isinstance(failed.error, StageFailed)
    assert "holds a object; only tensors and plain values" in failed.error.message
