"""Drafters for tests, and the conditions under which every drafter must leave the tokens as they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ar_adapter import VOCAB, Driver, TinyAdapter, prompts, stage_request

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.speculation.drafter import Computed, Drafter, Wanted
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(5, (3, 17, 32, 9, 50))
TOKENS = 20


class Prophet:
    """Knows the answers: drafts the right token with probability `truth`, else any, and `extra` tokens too many."""

    def __init__(
        self, answers: Sequence[Sequence[int]], truth: float = 1.0, *, most: int = 4, extra: int = 0, seed: int = 0
    ) -> None:
        self.known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=False)]
        self.truth, self.most, self.extra = truth, most, extra
        self.random = random.Random(seed)
        self.asked = 0
        self.keys: set[str] = set()

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None

    def observe(self, computed: Sequence[Computed]) -> None:
        raise AssertionError("it wants no rows")

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.asked += 1
        return [self._guess(entry) for entry in wanted]

    def _guess(self, entry: Wanted) -> list[int]:
        self.keys.add(entry.key)
        place = len(entry.ids)
        future = next((known[place:] for known in self.known if known[:place] == list(entry.ids)), [])
        draft_ids = future[: min(self.most, entry.most) + self.extra]
        return [token if self.random.random() < self.truth else self._lie(token) for token in draft_ids]

    def _lie(self, token: int) -> int:
        return (token + self.random.randrange(1, VOCAB + 2)) % (VOCAB + 3) - 2 if self.truth else (token + 1) % VOCAB

    def forget(self, key: str) -> None:
        self.keys.discard(key)

    def audit(self) -> None:
        pass


def speculating(
    adapter: TinyAdapter, drafter: Drafter, *, tokens: int = 4, adaptive: bool = False, **config: Any
) -> Driver:
    """A driver over an engine that speculates."""
    sizes = AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})
    return Driver(AutoregressiveEngine(adapter, sizes, speculation=Speculation(drafter, tokens, adaptive=adaptive)))


def plainly(adapter: TinyAdapter, **config: Any) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})))


def serve(
    drive: Driver,
    sampling: SamplingParams,
    *,
    opted_out: Sequence[int] = (),
    which: Sequence[int] = range(5),
    **fields: Any,
) -> list[list[int]]:
    """Tokens of the prompts, all at once; request i has seed 100 + i."""
    for index in which:
        own = SamplingParams(speculate=index not in opted_out).over(sampling)
        drive.add(stage_request(f"r{index}", sampling=own, seed=100 + index, **fields), PROMPTS[index])
    results = drive.run()
    assert drive.engine.stats()["blocks_used"] == 0
    return [results[f"r{index}"].token_ids for index in which]


def alone(adapter: TinyAdapter, make: Callable[[], Drafter], sampling: SamplingParams) -> list[list[int]]:
    drive = speculating(adapter, make())
    return [serve(drive, sampling, which=[index])[0] for index in range(5)]


def batched(adapter: TinyAdapter, make: Callable[[], Drafter], sampling: SamplingParams) -> list[list[int]]:
    return serve(speculating(adapter, make()), sampling)


def beside_plain_ones(adapter: TinyAdapter, make: Callable[[], Drafter], sampling: SamplingParams) -> list[list[int]]:
    return serve(speculating(adapter, make()), sampling, opted_out=[1, 4])


def chunked(adapter: TinyAdapter, make: Callable[[], Drafter], sampling: SamplingParams) -> list[list[int]]:
    return serve(speculating(adapter, make(), max_tokens_per_step=11), sampling)


def preempted(adapter: TinyAdapter, make: Callable[[], Drafter], sampling: SamplingParams) -> list[list[int]]:
    drive = speculating(adapter, make(), num_blocks=11)
    tokens = serve(drive, sampling)
    assert drive.engine.stats()["preemptions_total"] > 0
    return tokens


def after_a_prefix_hit(adapter: TinyAdapter, make: Callable[[], Drafter], sampling: SamplingParams) -> list[list[int]]:
    drive = speculating(adapter, make())
    first = serve(drive, sampling)
    drive.results.clear()
    assert serve(drive, sampling) == first
    assert drive.engine.stats()["prefix_hit_tokens_total"] > 0
    return first


def resumed(adapter: TinyAdapter, make: Callable[[], Drafter], sampling: SamplingParams) -> list[list[int]]:
    known = serve(plainly(adapter), sampling)
    drive = speculating(adapter, make())
    for index in range(5):
        request = stage_request(f"r{index}", sampling=sampling, seed=100 + index, resume=known[index][:7])
        drive.add(request, PROMPTS[index])
    results = drive.run()
    return [results[f"r{index}"].token_ids for index in range(5)]


CONDITIONS = [alone, batched, beside_plain_ones, chunked, preempted, after_a_prefix_hit, resumed]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=TOKENS),
    "sampled": SamplingParams(temperature=0.8, top_k=30, top_p=0.95, max_tokens=TOKENS),
    "penalised": SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={5: 2.0},
        min_tokens=14,
        stop_token_ids=[7, 11],
    ),
}
