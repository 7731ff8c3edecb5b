"""Ranks of a denoiser without a model, each a thread: what fails in one, and who hears of it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusion_fakes import Ask, FakeDenoiser, made, truth

from segue.engines.contract import StageOutput
from segue.engines.diffusion.contract import Row
from segue.engines.diffusion.engine import DiffusionEngine
from segue.engines.diffusion.sharing import Sharing
from segue.engines.ranks import Leading, follow
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed
from segue.parallel.group import ReplicaBroken
from segue.parallel.ranks import Ranks
from segue.parallel.ways import Shape, meet

CPU = torch.device("cpu")
ASKS = (Ask("plain", calls=2), Ask("guided", calls=3, guided=True, outputs=2))
BRANCHES, NETWORK = Shape(branches=2), Shape(weights=2)


class Follower(threading.Thread):
    """`broken`: what it ended with."""

    def __init__(self, live: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.broken: BaseException | None = None
        self._live = live

    def run(self) -> None:
        try:
            self._live()
        except BaseException as error:
            self.broken = error


@contextmanager
def ranks(meeting: Path, shape: Shape, *fakes: FakeDenoiser, warm: bool = False, broken: str = "") -> Iterator[Leading]:
    """Rank 0's engine; each rank is a thread. `warm`: all warm up before. `broken`: what one of them ends with."""
    for fake in fakes:
        fake.asks.update({ask.name: ask for ask in ASKS})
    pairs = [socket.socketpair() for _ in fakes[1:]]

    def engine(rank: int, ends: list[socket.socket]) -> tuple[DiffusionEngine, Ranks]:
        ways = meet(rank, shape, meeting, CPU)
        link = Ranks(ways.everyone, ends)
        return DiffusionEngine(fakes[rank], None, Sharing(fakes[rank], ways, link), link), link

    def live(rank: int, end: socket.socket) -> None:
        with end, torch.inference_mode():
            own, link = engine(rank, [end])
            if warm:
                own.warm_up()
            follow(own, link)

    followers = [Follower(partial(live, rank, far)) for rank, (_, far) in enumerate(pairs, start=1)]
    for follower in followers:
        follower.start()
    made, link = engine(0, [near for near, _ in pairs])
    try:
        if warm:
            made.warm_up()
        yield Leading(made, link, compared_every=2)
    finally:
        link.close()
        for follower in followers:
            follower.join(240)
            assert not follower.is_alive(), "a rank hangs"
    assert broken in "".join(str(follower.broken) for follower in followers)


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
        assert_true(made(leader, *ASKS), ASKS)
    assert [sum(map(len, fake.calls)) for fake in fakes] == rows
    assert all(set(fake.ended) == {"plain", "guided"} for fake in fakes)


@pytest.mark.parametrize("shape", [BRANCHES, NETWORK])
def test_what_a_follower_cannot_prepare_is_logged_there_and_told(
    shape: Shape, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = FakeDenoiser()
    with ranks(tmp_path / "meeting", shape, FakeDenoiser(), there) as leader:
        del there.asks["guided"]
        [failed] = [one for one in made(leader, ASKS[1]) if one.error is not None]
        assert isinstance(failed.error, StageFailed)
        assert "rank 1 could not prepare request guided; its log says why" in failed.error.message
        assert_true(made(leader, ASKS[0]), ASKS[:1])
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
        [failed] = [one for one in made(leader, ASKS[1]) if one.error is not None]
        assert isinstance(failed.error, InvalidRequest)
        assert failed.error.field == "prompt"
        assert_true(made(leader, ASKS[0]), ASKS[:1])


def test_what_one_rank_of_a_part_fails_with_alone_ends_the_replica(tmp_path: Path) -> None:
    shape = Shape(branches=2, weights=2)
    fakes = [FakeDenoiser(), FakeDenoiser(), FakeDenoiser(fails=refused), FakeDenoiser()]
    said = "rank 2: InvalidRequest: too short, rank 3: nothing failed"
    with ranks(tmp_path / "meeting", shape, *fakes) as leader, pytest.raises(ReplicaBroken, match=said):
        made(leader, ASKS[1])


def full(rows: Sequence[Row]) -> Exception | None:
    return torch.OutOfMemoryError("over") if len(rows) > 1 else None


def test_memory_that_is_over_for_a_branch_makes_the_batch_smaller(tmp_path: Path) -> None:
    """No rank waits for another in a call."""
    with ranks(tmp_path / "meeting", BRANCHES, FakeDenoiser(), FakeDenoiser(fails=full)) as leader:
        assert_true(made(leader, *ASKS), ASKS)
        assert leader.stats()["retries_total"] == 1.0


def test_memory_that_is_over_in_a_divided_network_ends_the_replica(tmp_path: Path) -> None:
    """In the middle of a call others may be further on: nobody knows what they wait for."""
    said = "rank 0 ran out of memory in the middle of a call"
    trials = [FakeDenoiser(fails=full, made_up=(4,)) for _ in range(2)]
    with (
        pytest.raises(ConfigError, match=f"warm-up together: .*{said}"),
        ranks(tmp_path / "meeting", NETWORK, *trials, warm=True),
    ):
        raise AssertionError("the warm-up makes calls of two rows")
    fakes = FakeDenoiser(fails=full), FakeDenoiser()
    with ranks(tmp_path / "again", NETWORK, *fakes) as leader, pytest.raises(ReplicaBroken, match=f"step: {said}"):
        made(leader, ASKS[1])


class Hasty(FakeDenoiser):
    """Loses a step in its second call."""

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        if len(self.calls) == 1:
            rows[0].sample.step -= 1
        return super().predict(rows)


def test_a_rank_that_differs_ends(tmp_path: Path) -> None:
    ask = Ask("plain", calls=8)
    fakes = FakeDenoiser(), Hasty()
    with ranks(
        tmp_path / "meeting", NETWORK, *fakes, broken="rank 1 has diverged from rank 0: its steps differ"
    ) as leader:
        for fake in fakes:
            fake.asks["plain"] = ask
        with pytest.raises(ReplicaBroken):
            made(leader, ask)


def test_both_measure_the_same_trials(tmp_path: Path) -> None:
    here, there = FakeDenoiser(made_up=(4, 16)), FakeDenoiser(made_up=(4, 16))
    with ranks(tmp_path / "meeting", NETWORK, here, there, warm=True) as leader:
        assert isinstance(leader.inner, DiffusionEngine)
        assert leader.inner.costs.per_row
    assert here.calls == there.calls
    assert here.calls


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    with ranks(tmp_path / "meeting", BRANCHES, FakeDenoiser(), FakeDenoiser()) as leader:
        leader.add(ASKS[0].request())
        with pytest.raises(StageFailed, match="holds a object; only tensors and plain values"):
            leader.feed("plain", "input", {"odd": object()}, final=True)
