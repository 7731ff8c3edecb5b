"""Memory that is over on one rank of a divided denoiser, and there alone: its allocator really refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import row_rank_fake
import torch
from diffusion_fakes import made, truth
from row_rank_fake import ASKS, CPU, ROW, SHAPE, Exchanging, engine_of, exchanging

from segue.engines.contract import StageOutput
from segue.engines.ranks import Leading
from segue.messages.errors import StageFailed
from segue.parallel.group import ReplicaBroken
from segue.parallel.ranks import Ranks
from segue.parallel.ways import meet


@contextmanager
def pair(
    meeting: Path, more: int, taken: int = 0, *, fails: bool = False, says: str = ""
) -> Iterator[tuple[Leading, Exchanging]]:
    """Rank 0's engine and its denoiser. `more` and `taken`: of rank 1's memory; `fails`: whether it ends so, and what
    it `says` then."""
    near, far = socket.socketpair()
    command = [sys.executable, row_rank_fake.__file__, str(far.fileno()), str(meeting), str(more), str(taken)]
    follower = subprocess.Popen(command, pass_fds=[far.fileno()], stderr=subprocess.PIPE, text=True)
    far.close()
    ways = meet(0, SHAPE, meeting, CPU)
    ranks, fake = Ranks(ways.everyone, [near]), exchanging(ways)
    try:
        yield Leading(engine_of(fake, ways, ranks), ranks), fake
    finally:
        ranks.close()
        _, heard = follower.communicate(timeout=240)
        # threads of the library's may abort a process that ends without memory
        assert (follower.returncode != 0, says in heard) == (fails, True), heard


def assert_true(outputs: list[StageOutput]) -> None:
    done = {one.request_id: one.payload["latents"] for one in outputs if one.payload}
    for ask in ASKS:
        torch.testing.assert_close(done[ask.name], truth(ask, 0), rtol=0, atol=1e-5)


def test_the_batch_is_made_again_smaller(tmp_path: Path) -> None:
    with pair(tmp_path / "meeting", more=ROW + ROW // 2) as (engine, fake):
        assert_true(made(engine, *ASKS))
        assert fake.calls == [[(ask.name, 0)] for _ in range(2) for ask in ASKS], "a row by itself"
        assert engine.stats()["retries_total"] == 1.0, "what does not fit is tried once"


def test_what_never_fits_fails_alone(tmp_path: Path) -> None:
    with pair(tmp_path / "meeting", more=ROW // 2) as (engine, fake):
        outputs = made(engine, *ASKS)
        assert not fake.calls, "nobody begins"
    assert {one.request_id for one in outputs if isinstance(one.error, StageFailed)} == {ask.name for ask in ASKS}
    assert all("does not fit into the free memory" in str(one.error) for one in outputs)


def test_in_the_middle_of_a_call_it_ends_the_replica(tmp_path: Path) -> None:
    """Rank 0 waits for the other at that moment."""
    says = "rank 1 ran out of memory in the middle of a call"
    with (
        pair(tmp_path / "meeting", more=4 * ROW, taken=64 * ROW, fails=True, says=says) as (engine, _),
        pytest.raises(ReplicaBroken, match=r"a follower does not answer .*closed its end"),
    ):
        made(engine, ASKS[0])
