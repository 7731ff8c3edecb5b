"""Ranks of a stage model that yields rows of codes: every rank makes every call, on the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, prompts, stage_request
from ar_numbers import NumberAdapter, plain_numbers
from ar_rows import RowAdapter, codes, plain_rows
from rank_threads import replica

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Draws, Fed, Prompt, numbers_of
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import Payload
from segue.messages.sampling import SamplingParams
from segue.parallel.ranks import Ranks

TOKENS = 8
SAMPLED = SamplingParams(temperature=0.9, top_k=20, max_tokens=TOKENS)
PROMPTS = prompts(3, (5, 16, 33))


class Noted(TinyAdapter):
    """Notes the embeddings and codes that it gives."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.gave: list[torch.Tensor] = []

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        return Fed(prompt=Prompt(payload["ids"]))

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
def test_ranks_give_the_rows_of_one_process(kind: type[Noted]) -> None:
    models: list[Noted] = []

    def build(ranks: Ranks) -> AutoregressiveEngine:
        model = kind(seed=2)
        models.append(model)
        sizes = AutoregressiveConfig(num_blocks=9, block_size=8, max_tokens_per_step=24, enforce_eager=True)
        return AutoregressiveEngine(model, sizes, ranks=ranks)

    with replica(build) as made:
        drive = Driver(made.lead)
        for index, prompt in enumerate(PROMPTS):
            made.lead.add(stage_request(f"r{index}", seed=index, sampling=SAMPLED))
            made.lead.feed(f"r{index}", "input", {"ids": prompt}, final=True)
        drive.run()
    for index, prompt in enumerate(PROMPTS):
        rows = codes(drive, f"r{index}")
        if kind is NotedRows:
            assert rows == plain_rows(RowAdapter(seed=2), prompt, TOKENS, SAMPLED, index)
        else:
            expected = plain_numbers(NumberAdapter(seed=2), prompt, TOKENS, 0.9, index)
            torch.testing.assert_close(numbers_of(torch.tensor(rows)[:, 1:]), expected, atol=1e-3, rtol=0)
    assert kind is NotedNumbers or drive.engine.stats()["preemptions_total"] > 0
    ours, theirs = models
    assert len(ours.gave) == len(theirs.gave) > TOKENS
    assert all(map(torch.equal, ours.gave, theirs.gave))
