"""A leader and a follower of a denoiser without a model, in two threads: what fails in one, and who hears of it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_fakes import Ask, FakeDenoiser, made, truth

from segue.engines.contract import StageOutput
from segue.engines.diffusion.contract import Row
from segue.engines.diffusion.engine import DiffusionEngine
from segue.engines.diffusion.follower import follow_rows
from segue.engines.diffusion.ranks import RowLeader
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed
from segue.parallel.group import ReplicaBroken
from segue.parallel.orders import Crew
from segue.parallel.ways import Shape, meet

CPU = torch.device("cpu")
ASKS = (Ask("plain", calls=2), Ask("guided", calls=3, guided=True, outputs=2))
BRANCHES, NETWORK = Shape(branches=2), Shape(weights=2)


class Follower(threading.Thread):
    """`broken`: what it ended with."""

    def __init__(self, fake: FakeDenoiser, orders: socket.socket, rank: int, shape: Shape, meeting: Path) -> None:
        super().__init__()
        self.broken: BaseException | None = None
        self._given = (fake, orders, rank, shape, meeting)

    def run(self) -> None:
        fake, orders, rank, shape, meeting = self._given
        try:
            follow_rows(fake, meet(rank, shape, meeting, CPU), orders)
        except BaseException as error:
            self.broken = error
        orders.close()


@contextmanager
def ranks(meeting: Path, shape: Shape, *fakes: FakeDenoiser) -> Iterator[RowLeader]:
    for fake in fakes:
        fake.asks.update({ask.name: ask for ask in ASKS})
    pairs = [socket.socketpair() for _ in fakes[1:]]
    followers = [
        Follower(fake, far, rank, shape, meeting)
        for rank, (fake, (_, far)) in enumerate(zip(fakes[1:], pairs, strict=True), start=1)
    ]
    for follower in followers:
        follower.start()
    crew = Crew([near for near, _ in pairs])
    leader = RowLeader(fakes[0], meet(0, shape, meeting, CPU), crew)
    try:
        yield leader
    finally:
        crew.close()
        for follower in followers:
            follower.join()


def assert_true(outputs: Sequence[StageOutput], asks: Sequence[Ask]) -> None:
    done = {(one.request_id, one.index): one.payload["latents"] for one in outputs if one.payload}
    assert set(done) == {(ask.name, index) for ask in asks for index in range(ask.outputs)}
    for ask in asks:
        for index in range(ask.outputs):
            torch.testing.assert_close(done[ask.name, index], truth(ask, index), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (BRANCHES, [2 + 6, 6]),
        (NETWORK, [2 + 6 + 6] * 2),
        (Shape(branches=2, tokens=2), [2 + 6, 2 + 6, 6, 6]),
        (Shape(branches=3), [2 + 6, 6, 0]),
    ],
)
def test_several_equal_one(shape: Shape, rows: list[int], tmp_path: Path) -> None:
    """`rows`: that each rank computes, of the prompts and of the second branch."""
    fakes = [FakeDenoiser() for _ in rows]
    with ranks(tmp_path / "meeting", shape, *fakes) as leader:
        assert_true(made(DiffusionEngine(leader), *ASKS), ASKS)
    assert [sum(map(len, fake.calls)) for fake in fakes] == rows
    assert all(set(fake.ended) == {"plain", "guided"} for fake in fakes)


@pytest.mark.parametrize("shape", [BRANCHES, NETWORK])
def test_what_a_follower_cannot_prepare_is_logged_there_and_told(
    shape: Shape, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = FakeDenoiser()
    with ranks(tmp_path / "meeting", shape, FakeDenoiser(), there) as leader:
        del there.asks["guided"]
        leader.serve()
        engine = DiffusionEngine(leader)
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


def refused_there(rows: Sequence[Row]) -> Exception | None:
    return refused(rows) if rows[0].branch == 1 else None


@pytest.mark.parametrize(
    ("shape", "fails"),
    [
        (NETWORK, refused),
        (Shape(branches=2, weights=2), refused),
        (Shape(branches=2, weights=2), refused_there),
        (BRANCHES, refused_there),
    ],
)
def test_what_all_ranks_of_a_part_refuse_is_the_failure_of_that_request(
    shape: Shape, fails: Callable[[Sequence[Row]], Exception | None], tmp_path: Path
) -> None:
    with ranks(tmp_path / "meeting", shape, *(FakeDenoiser(fails=fails) for _ in range(shape.size))) as leader:
        leader.serve()
        engine = DiffusionEngine(leader)
        [failed] = [one for one in made(engine, ASKS[1]) if one.error is not None]
        assert isinstance(failed.error, InvalidRequest)
        assert failed.error.field == "prompt"
        assert_true(made(engine, ASKS[0]), ASKS[:1])


def test_what_one_rank_of_a_part_fails_with_alone_ends_the_replica(tmp_path: Path) -> None:
    shape = Shape(branches=2, weights=2)
    fakes = [FakeDenoiser(), FakeDenoiser(), FakeDenoiser(fails=refused), FakeDenoiser()]
    with ranks(tmp_path / "meeting", shape, *fakes) as leader:
        leader.serve()
        with pytest.raises(ReplicaBroken, match="rank 2: InvalidRequest: too short, rank 3: nothing failed"):
            made(DiffusionEngine(leader), ASKS[1])


def full(rows: Sequence[Row]) -> Exception | None:
    return torch.OutOfMemoryError("over") if len(rows) > 1 else None


def test_memory_that_is_over_for_a_branch_makes_the_batch_smaller(tmp_path: Path) -> None:
    """No rank waits for another in a call."""
    with ranks(tmp_path / "meeting", BRANCHES, FakeDenoiser(), FakeDenoiser(fails=full)) as leader:
        leader.serve()
        engine = DiffusionEngine(leader)
        assert_true(made(engine, *ASKS), ASKS)
        assert engine.stats()["retries_total"] == 1.0


def test_memory_that_is_over_in_a_divided_network_ends_the_replica(tmp_path: Path) -> None:
    """In the middle of a call others may be further on: nobody knows what they wait for."""
    with (
        ranks(tmp_path / "meeting", NETWORK, FakeDenoiser(fails=full), FakeDenoiser(fails=full)) as leader,
        pytest.raises(ConfigError, match=r"warm-up together: rank 0 ran out of memory in the middle of a call"),
    ):
        leader.predict([Row(sample, 0) for sample in given(leader)])
    with ranks(tmp_path / "again", NETWORK, FakeDenoiser(fails=full), FakeDenoiser()) as leader:
        leader.serve()
        with pytest.raises(ReplicaBroken, match="out of step: rank 0 ran out of memory in the middle of a call"):
            made(DiffusionEngine(leader), ASKS[1])


def given(leader: RowLeader) -> Sequence[Any]:
    request = ASKS[1].request()
    return leader.feed(leader.begin(request), "input", {}, final=True)


def test_both_measure_the_same_trials(tmp_path: Path) -> None:
    here, there = FakeDenoiser(made_up=(4, 16)), FakeDenoiser(made_up=(4, 16))
    with ranks(tmp_path / "meeting", NETWORK, here, there) as leader:
        engine = DiffusionEngine(leader)
        engine.warm_up()
        assert engine.costs.per_row
    assert here.calls == there.calls


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    with ranks(tmp_path / "meeting", BRANCHES, FakeDenoiser(), FakeDenoiser()) as leader:
        engine = DiffusionEngine(leader)
        engine.add(ASKS[0].request())
        engine.feed("plain", "input", {"odd": object()}, final=True)
        [failed] = engine.step()
    assert isinstance(failed.error, StageFailed)
    assert "holds a object; only tensors and plain values" in failed.error.message
