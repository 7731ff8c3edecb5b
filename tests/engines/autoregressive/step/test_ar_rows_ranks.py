"""Ranks of a stage model that yields rows of codes: followers run every call of the leader, on the same values."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, prompts, stage_request
from ar_numbers import NumberAdapter, plain_numbers
from ar_rows import RowAdapter, codes, plain_rows

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Draws, numbers_of
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.parallel.follower import follow
from segue.engines.autoregressive.parallel.ranks import Leader
from segue.messages.sampling import SamplingParams
from segue.parallel.group import Group
from segue.parallel.orders import Crew

TOKENS = 8
SAMPLED = SamplingParams(temperature=0.9, top_k=20, max_tokens=TOKENS)
PROMPTS = prompts(3, (5, 16, 33))


class Noted(TinyAdapter):
    """Notes the embeddings and codes that it gives."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.gave: list[torch.Tensor] = []

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        self.gave.append(super().embed(token_ids, conditioning).clone())
        return self.gave[-1]

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        self.gave.append(super().advance(hidden, ids, draws))
        return self.gave[-1]


class NotedRows(Noted, RowAdapter):
    pass


class NotedNumbers(Noted, NumberAdapter):
    pass


@pytest.mark.parametrize("kind", [NotedRows, NotedNumbers])
def test_followers_give_the_rows_of_the_leader(tmp_path: Path, kind: type[Noted]) -> None:
    ours, theirs = kind(seed=2), kind(seed=2)
    near, far = socket.socketpair()

    def second() -> None:
        follow(theirs, Group(1, 2, tmp_path / "meeting", theirs.device), far, None)

    thread = threading.Thread(target=second)
    thread.start()
    try:
        led = Leader(ours, Group(0, 2, tmp_path / "meeting", ours.device), Crew([near]))
        sizes = AutoregressiveConfig(num_blocks=9, block_size=8, max_tokens_per_step=24, enforce_eager=True)
        drive = Driver(AutoregressiveEngine(led, sizes))
        for index, prompt in enumerate(PROMPTS):
            drive.add(stage_request(f"r{index}", seed=index, sampling=SAMPLED), prompt)
        drive.run()
    finally:
        near.close()
        thread.join(60)
        far.close()
    for index, prompt in enumerate(PROMPTS):
        rows = codes(drive, f"r{index}")
        if kind is NotedRows:
            assert rows == plain_rows(RowAdapter(seed=2), prompt, TOKENS, SAMPLED, index)
        else:
            expected = plain_numbers(NumberAdapter(seed=2), prompt, TOKENS, 0.9, index)
            torch.testing.assert_close(numbers_of(torch.tensor(rows)[:, 1:]), expected, atol=1e-3, rtol=0)
    assert kind is NotedNumbers or drive.engine.stats()["preemptions_total"] > 0
    assert len(ours.gave) == len(theirs.gave) > TOKENS
    assert all(map(torch.equal, ours.gave, theirs.gave))
