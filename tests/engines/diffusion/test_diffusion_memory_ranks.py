"""Memory that is over on one rank of a divided denoiser, and there alone: its allocator really refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import row_rank_fake
import torch
from diffusion_fakes import made, truth
from row_rank_fake import ASKS, CPU, ROW, SHAPE, Exchanging, exchanging

from segue.engines.contract import StageOutput
from segue.engines.diffusion.engine import DiffusionEngine
from segue.engines.diffusion.ranks import RowLeader
from segue.messages.errors import StageFailed
from segue.parallel.group import ReplicaBroken
from segue.parallel.orders import Crew
from segue.parallel.row_orders import Begin, CallStatus, Feed, Predict, decode_status, encode_row_order
from segue.parallel.ways import Ways, meet


@contextmanager
def following(
    meeting: Path, more: int, taken: int = 0, *, fails: bool = False, says: str = ""
) -> Iterator[tuple[Ways, Crew]]:
    """`more` and `taken`: of the follower's memory; `fails`: whether it ends so, and what it `says` then."""
    near, far = socket.socketpair()
    command = [sys.executable, row_rank_fake.__file__, str(far.fileno()), str(meeting), str(more), str(taken)]
    follower = subprocess.Popen(command, pass_fds=[far.fileno()], stderr=subprocess.PIPE, text=True)
    far.close()
    crew = Crew([near])
    ways = meet(0, SHAPE, meeting, CPU)
    try:
        yield ways, crew
    finally:
        crew.close()
        _, heard = follower.communicate(timeout=240)
        # threads of the library's may abort a process that ends without memory
        assert (follower.returncode != 0, says in heard) == (fails, True), heard


@contextmanager
def pair(meeting: Path, more: int, taken: int = 0, *, fails: bool = False, says: str = "") -> Iterator[RowLeader]:
    """As `following`."""
    with following(meeting, more, taken, fails=fails, says=says) as (ways, crew):
        leader = RowLeader(exchanging(ways), ways, crew)
        leader.serve()
        yield leader


def assert_true(outputs: list[StageOutput]) -> None:
    done = {one.request_id: one.payload["latents"] for one in outputs if one.payload}
    for ask in ASKS:
        torch.testing.assert_close(done[ask.name], truth(ask, 0), rtol=0, atol=1e-5)


def test_the_batch_is_made_again_smaller(tmp_path: Path) -> None:
    with pair(tmp_path / "meeting", more=ROW + ROW // 2) as leader:
        engine = DiffusionEngine(leader)
        assert_true(made(engine, *ASKS))
        assert isinstance(leader.inner, Exchanging)
        assert leader.inner.calls == [[(ask.name, 0)] for _ in range(2) for ask in ASKS], "a row by itself"
        assert engine.stats()["retries_total"] == 1.0, "what does not fit is tried once"


def test_what_never_fits_fails_alone(tmp_path: Path) -> None:
    with pair(tmp_path / "meeting", more=ROW // 2) as leader:
        outputs = made(DiffusionEngine(leader), *ASKS)
        assert isinstance(leader.inner, Exchanging)
        assert not leader.inner.calls, "nobody begins"
    assert {one.request_id for one in outputs if isinstance(one.error, StageFailed)} == {ask.name for ask in ASKS}
    assert all("does not fit into the free memory" in str(one.error) for one in outputs)


def test_what_the_latents_take_is_counted(tmp_path: Path) -> None:
    """Of a call that is named and not made: a row would fit, but not beside the latents."""
    with following(tmp_path / "meeting", more=ROW + ROW // 2) as (_, crew):
        [ask, _] = ASKS
        request = msgspec.Raw(msgspec.msgpack.encode(ask.request()))
        for order in (Begin(request), Feed(ask.name, "input", {}, True)):
            crew.send(encode_row_order(order))

        def status(numbers: int) -> CallStatus:
            crew.send(encode_row_order(Predict([(ask.name, 0, 0, 0)], False, [1, numbers], "float32")))
            return decode_status(crew.next_answer((), None)[1])

        assert not status(4).kind
        assert status(ROW // 4).no_memory
        assert status(ROW).no_memory, "the latents themselves"
        assert not status(4).kind, "nothing of them is kept"


def test_in_the_middle_of_a_call_it_ends_the_replica(tmp_path: Path) -> None:
    """The leader waits for the other at that moment."""
    says = "rank 1 ran out of memory in the middle of a call"
    with (
        pair(tmp_path / "meeting", more=4 * ROW, taken=64 * ROW, fails=True, says=says) as leader,
        pytest.raises(ReplicaBroken, match=r"a follower does not answer .*closed its end"),
    ):
        made(DiffusionEngine(leader), ASKS[0])
