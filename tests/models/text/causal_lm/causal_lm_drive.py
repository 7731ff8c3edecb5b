"""An engine over a language model, driven step by step, and a drafter that knows the answers."""

from __future__ import annotations

from typing import Any

import torch
from made_engine import engine_over

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.contract import StageRequest
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK, SamplingParams

TOKENS = 14
"""Of a reply, at most."""


class Drive:
    """An engine, and what came out of it by request and output."""

    def __init__(self, adapter: Any, *, ahead: bool | None = None, drafter: Any = None, **config: Any) -> None:
        speculation = None if drafter is None else Speculation(drafter, 4, adaptive=False)
        sizes = AutoregressiveConfig(**{"num_blocks": 128, "block_size": 8, "max_batch": 8, **config})
        self.engine = engine_over(adapter, sizes, speculation=speculation, ahead=ahead)
        self.answers: dict[tuple[str, int], list[int]] = {}

    def add(self, name: str, prompt: list[int], *, then: str = "end", seed: int = 0, **sampling: Any) -> None:
        """`then`: what follows the prompt (`Then`); more may be appended."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, **sampling}).over(FALLBACK)
        request = StageRequest(
            name,
            "llm",
            Request(request_id=name),
            params,
            seed=seed,
            upstreams=frozenset({"input"}),
            downstreams=frozenset(),
            to_client=frozenset(),
        )
        self.engine.add(request)
        self.append(name, prompt, then)

    def append(self, name: str, piece: list[int], then: str) -> None:
        self.engine.feed(name, "input", {"token_ids": torch.tensor(piece), "then": then}, final=then == "end")

    def step(self) -> None:
        for output in self.engine.step():
            assert output.error is None, output.error
            self.answers.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        self.engine.audit()

    def run(self) -> dict[tuple[str, int], list[int]]:
        while self.engine.has_work():
            self.step()
        return self.answers


class Knowing:
    """Knows the answers; every `lie`-th of its guesses is wrong."""

    def __init__(self, known: list[list[int]], lie: int) -> None:
        self.known, self.lie, self.said = known, lie, 0

    def rows(self, hidden: torch.Tensor) -> None:
        return None

    def observe(self, computed: Any) -> None:
        raise AssertionError("it wants no rows")

    def propose(self, wanted: Any) -> list[list[int]]:
        return [self._guess(entry) for entry in wanted]

    def _guess(self, entry: Any) -> list[int]:
        place = len(entry.ids)
        future = next((known[place:] for known in self.known if known[:place] == list(entry.ids)), [])
        draft_ids = []
        for token in future[: entry.most]:
            self.said += 1
            draft_ids.append((token + 1) % 600 if self.said % self.lie == 0 else token)
        return draft_ids

    def forget(self, key: str) -> None:
        pass

    def audit(self) -> None:
        pass
