"""A stage model that draws by head, and reads the rows before, gives the rows of a plain loop, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ar_adapter import HIDDEN, VOCAB, TinyAdapter, prompts, stage_request, tiny_model
from ar_rows import codes, rows_driver

from segue.engines.autoregressive.contract import Draws
from segue.engines.autoregressive.sample.sampler import code_uniforms
from segue.kernels.attention.paged_attention import NAME
from segue.messages.sampling import SamplingParams

GROUPS, BACK, TOKENS = 3, 4, 14
PROMPTS = prompts(3, (5, 16, 33))
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_tokens=TOKENS)
WAYS = [GREEDY, SAMPLED, SAMPLED]


class HeadAdapter(TinyAdapter):
    """Code 0 is the sum of what the last rows had, modulo the vocabulary, from the fourth row on; the others are drawn
    by heads that see the last row."""

    groups = GROUPS
    looks_back = BACK
    draws_per_row = GROUPS - 1
    recordable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(tiny_model("qwen2", seed=2), **options)
        generator = torch.Generator().manual_seed(2)
        self.heads = torch.randn(GROUPS - 1, HIDDEN, VOCAB, generator=generator) * 3 * HIDDEN**-0.5
        self.seen = torch.randn(VOCAB + 1, VOCAB, generator=generator)

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        table = self.model.model.embed_tokens
        return table(token_ids) if token_ids.ndim == 1 else table(token_ids).sum(dim=1)

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        assert draws.recent is not None
        logits = torch.einsum("nh,ghv->ngv", hidden, self.heads) + self.seen[draws.recent[:, -1, 1:]]
        before = (draws.recent[:, :, 0] >= 0).sum(dim=1)
        first = torch.where(before == BACK, draws.recent.sum(dim=(1, 2)) % VOCAB, ids)
        return torch.cat([first[:, None], draws.heads(logits, 0)], dim=1)


@torch.inference_mode()
def plain(adapter: HeadAdapter, index: int) -> list[list[int]]:
    """Row after row, each forward over the whole sequence; codes 0 of the first rows as the engine has them alone."""
    drive = rows_driver(adapter, enforce_eager=True)
    way = WAYS[index]
    drive.add(stage_request("first", seed=index, sampling=way), PROMPTS[index])
    drive.run()
    firsts = [row[0] for row in codes(drive, "first")[:BACK]]
    model, out = adapter.model, []
    model.set_attn_implementation("eager")
    try:
        embeds = model.model.embed_tokens(torch.tensor(PROMPTS[index]))
        while len(out) < TOKENS:
            hidden = model.model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0, -1:]
            known = ([[-1] * GROUPS] * BACK + out)[-BACK:]
            filters = torch.tensor([[way.temperature, way.top_k or 0, way.top_p or 1.0]], dtype=torch.float64)
            draws = Draws(
                torch.from_numpy(code_uniforms(index, len(out), 1, GROUPS - 1)),
                torch.tensor([way.temperature == 0.0]),
                filters,
                recent=torch.tensor([known]),
            )
            first = torch.tensor([firsts[len(out)] if len(out) < BACK else 0])
            out.append(adapter.advance(hidden, first, draws)[0].tolist())
            embeds = torch.cat([embeds, adapter.embed(torch.tensor(out[-1:]), None)])
        return out
    finally:
        model.set_attn_implementation(NAME)


@pytest.fixture(scope="module")
def adapter() -> HeadAdapter:
    return HeadAdapter()


@pytest.fixture(scope="module")
def rows(adapter: HeadAdapter) -> list[list[list[int]]]:
    answers = [plain(adapter, index) for index in range(len(PROMPTS))]
    assert all(len({tuple(row) for row in one}) > TOKENS // 2 for one in answers), "the codes do not change"
    return answers


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "config",
    [{}, {"max_tokens_per_step": 7, "prefill_chunk": 5}, {"num_blocks": 8}, {"deterministic": True}],
    ids=["together", "chunks", "preempted", "deterministic"],
)
def test_together(adapter: HeadAdapter, rows: list, config: dict, ahead: bool) -> None:
    drive = rows_driver(adapter, ahead=ahead, enforce_eager=bool(config), **config)
    for index, way in enumerate(WAYS):
        drive.add(stage_request(f"r{index}", seed=index, sampling=way), PROMPTS[index])
    drive.run()
    assert [codes(drive, f"r{index}") for index in range(len(WAYS))] == rows
    assert (drive.engine.stats()["preemptions_total"] > 0) == ("num_blocks" in config)


@pytest.mark.parametrize("known", [1, 3, TOKENS - 1])
def test_continued(adapter: HeadAdapter, rows: list, known: int) -> None:
    drive = rows_driver(adapter, ahead=True, enforce_eager=True)
    for index, way in enumerate(WAYS):
        made = stage_request(f"r{index}", seed=index, sampling=way, resume=rows[index][:known])
        drive.add(made, PROMPTS[index])
    drive.run()
    assert [codes(drive, f"r{index}") for index in range(len(WAYS))] == rows
