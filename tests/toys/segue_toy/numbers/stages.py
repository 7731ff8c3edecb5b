"""A talker of numbers with a stop score, and a stage that makes audio of them."""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.autoregressive.contract import Draws, numbers_of
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.sampling import SamplingParams
from segue_toy.rows.stages import Talker
from segue_toy.stages import SAMPLES_PER_TOKEN, Counter, Input, Tone, ids_forward, rows_forward, stop_point

STOP = 1
WIDTH = 4
NEVER = -1e30


class NumberTalker(Talker):
    """Each row depends on the numbers before it, on a row of the counter, and on the request's noise."""

    groups = 1 + WIDTH

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.vocab_size = 2
        self.end_token_ids = frozenset({STOP})
        self.default_sampling = SamplingParams(temperature=0.5, max_tokens=60)

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        if token_ids.ndim == 1:
            return (token_ids.float() / 97)[:, None].expand(-1, WIDTH).contiguous()
        numbers = numbers_of(token_ids[:, 1:])
        return numbers if conditioning is None else numbers + conditioning[:, :1] / 97

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        stops = hidden.sum(dim=1) > 5.0
        return torch.stack([torch.where(stops, NEVER, 0.0), torch.where(stops, 0.0, NEVER)], dim=1)

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        return draws.codes_of(torch.sin(hidden.flip(1)) + draws.noise().float())


class Numbers(Tone):
    """240 samples of each number of a row."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        fresh = torch.zeros(0)
        if "numbers" in payload:
            fresh = payload["numbers"][max(0, state["have"] - int(payload["start"])) :]
        item = (state["have"], fresh.flatten())
        state["have"] += len(fresh)
        return [Work(state["request"].request_id, item, last=final)]

    def run(self, works: list[Work]) -> list[Result]:
        results = []
        for start, numbers in (work.item for work in works):
            samples = numbers.repeat_interleave(SAMPLES_PER_TOKEN)
            first = start * WIDTH * SAMPLES_PER_TOKEN
            results.append(Result({"samples": samples, "start": first, "sample_rate": 24000}))
        return results


def numbers_forward(request: StageRequest, output: TokenOutput) -> Payload | None:
    if not output.codes:
        return None
    stop_point(request, "talker", output.first_index)
    return {"start": output.first_index, "numbers": numbers_of(torch.tensor(output.codes)[:, 1:])}


STAGE_MODELS = {"input": Input, "counter": Counter, "talker": NumberTalker, "tones": Numbers}
TRANSFERS = {
    ("input", "counter"): ids_forward,
    ("counter", "talker"): rows_forward,
    ("talker", "tones"): numbers_forward,
}
