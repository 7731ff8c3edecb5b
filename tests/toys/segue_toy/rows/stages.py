"""The stages of the family with rows. A request's option `hold` may name the talker, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.autoregressive.contract import Draws, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import StageFailed
from segue.messages.sampling import SamplingParams
from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB, Counter, Input, Tone, ids_forward, rows_forward, stop_point

GROUPS = 3
CODES = 29
ROWS = 24
WIDTH = 4


class Talker:
    """Each row depends on the whole row before it, on a row of the counter, and on the request's random numbers."""

    conditioned = True
    recordable = True
    groups = GROUPS
    vocabulary = None

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.kv = KVSpec(1, 1, WIDTH, torch.float32)
        self.axes = 1
        self.vocab_size = VOCAB
        self.max_model_len = 512
        self.weight_bytes = 0
        self.end_token_ids: frozenset[int] = frozenset()
        self.default_sampling = SamplingParams(temperature=1.0, max_tokens=ROWS)

    def begin(self, request: StageRequest) -> dict[str, Any]:
        return {"taken": 0}

    def feed(self, state: dict[str, Any], upstream: str, payload: Payload, *, final: bool) -> Fed:
        rows, fed = payload.get("rows"), Fed()
        if rows is not None:
            fresh = rows[max(0, state["taken"] - int(payload["start"])) :]
            if not state["taken"]:
                fed.prompt = Prompt([1, 2, 3], identity=())
            state["taken"] += len(fresh)
            fed.conditioning = fresh
        if final:
            fed.tail = torch.full((WIDTH,), 5.0)
        return fed

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        value = token_ids
        if token_ids.ndim == 2:
            value = (token_ids * torch.tensor([3, 5, 7])).sum(dim=1)
        place = value.float() if conditioning is None else value.float() + conditioning[:, 0]
        return place.remainder(VOCAB)[:, None].expand(-1, WIDTH).contiguous()

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        return embeds, None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _waves(hidden[:, 0], VOCAB)

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        state, codes = 2.0 * hidden[:, 0] + ids, []
        for group in range(1, GROUPS):
            codes.append(draws.code(group, _waves(state, CODES), top_k=12, top_p=0.9))
            state = 3.0 * state.remainder(VOCAB) + codes[-1]
        return torch.stack(codes, dim=1)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise StageFailed("the talker makes codes, not text")


def _waves(values: torch.Tensor, size: int) -> torch.Tensor:
    """[n, size]: something that every value decides."""
    return 2.0 * torch.sin(values.remainder(VOCAB)[:, None] * torch.arange(1.0, size + 1.0))


class Tones(Tone):
    """240 samples of each row's value."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        codes = payload.get("codes")
        fresh = torch.zeros(0)
        if codes is not None:
            values = (codes * torch.tensor([CODES * CODES, CODES, 1])).sum(dim=1).float()
            fresh = values[max(0, state["have"] - int(payload["start"])) :]
        item = (state["request"], state["have"], fresh)
        state["have"] += len(fresh)
        return [Work(state["request"].request_id, item, last=final)]

    def run(self, works: list[Work]) -> list[Result]:
        results = []
        for work in works:
            _, start, values = work.item
            samples = (values / (VOCAB * CODES * CODES)).repeat_interleave(SAMPLES_PER_TOKEN)
            results.append(Result({"samples": samples, "start": start * SAMPLES_PER_TOKEN, "sample_rate": 24000}))
        return results


def codes_forward(request: StageRequest, output: TokenOutput) -> Payload | None:
    if not output.codes:
        return None
    stop_point(request, "talker", output.first_index)
    return {"start": output.first_index, "codes": torch.tensor(output.codes)}


STAGE_MODELS = {"input": Input, "counter": Counter, "talker": Talker, "tones": Tones}
TRANSFERS = {
    ("input", "counter"): ids_forward,
    ("counter", "talker"): rows_forward,
    ("talker", "tones"): codes_forward,
}
