"""A tiny stage model that yields rows of codes, and its answer token by token, without engine, cache or batch."""

from __future__ import annotations

from typing import Any

import torch
from ar_adapter import HIDDEN, VOCAB, Driver, TinyAdapter, tiny_model
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Draws, Fed, Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.sample.sampler import code_uniforms, uniforms
from segue.engines.contract import Payload
from segue.kernels.attention.paged_attention import NAME
from segue.messages.sampling import SamplingParams

GROUPS = 4
CODES = 31
TOP_K, TOP_P = 9, 0.8


class Predictor(torch.nn.Module):
    """Codes 1 … 3 of a row, each from a state that has seen the talker's state and the codes before it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * scale

        self.mix = drawn(HIDDEN, HIDDEN, scale=2.0 * HIDDEN**-0.5)
        self.embeds = [drawn(VOCAB, HIDDEN), *(drawn(CODES, HIDDEN) for _ in range(GROUPS - 1))]
        self.heads = [drawn(HIDDEN, CODES, scale=3.0 * HIDDEN**-0.5) for _ in range(GROUPS - 1)]

    def begin(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ self.mix + self.embeds[0][ids])

    def go_on(self, state: torch.Tensor, group: int, codes: torch.Tensor) -> torch.Tensor:
        return torch.tanh(state @ self.mix + self.embeds[group][codes])


class RowAdapter(TinyAdapter):
    """The input of a generated row is the sum of its codes' embeddings."""

    groups = GROUPS
    recordable = True

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(tiny_model("qwen2", seed=seed), **options)
        self.predictor = Predictor(seed)
        self.advances: list[int] = []
        self.poisoned_code: int | None = None
        """A row whose code 0 is this one gets NaN from the predictor."""

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        table = self.model.model.embed_tokens
        if token_ids.ndim == 1:
            return table(token_ids)
        embeds = table(token_ids[:, 0])
        for group in range(1, GROUPS):
            embeds = embeds + self.predictor.embeds[group][token_ids[:, group]]
        return embeds if conditioning is None else embeds + conditioning

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        self.advances.append(len(ids))
        predictor = self.predictor
        state, codes = predictor.begin(hidden, ids), []
        if self.poisoned_code is not None:
            state = torch.where((ids == self.poisoned_code)[:, None], torch.nan, state)
        for group in range(1, GROUPS):
            logits = state @ predictor.heads[group - 1]
            codes.append(draws.code(group, logits, top_k=TOP_K, top_p=TOP_P))
            state = predictor.go_on(state, group, codes[-1])
        return torch.stack(codes, dim=1)


class ConditionedRowAdapter(RowAdapter):
    """A tiny talker with rows: row k from upstream is added to the input of row k."""

    conditioned = True

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        return Fed(payload.get("prompt"), payload.get("rows"), payload.get("tail"))


def _drawn(logits: torch.Tensor, number: float, params: SamplingParams) -> int:
    """The library's warpers over one row [vocab], then the first id whose cumulative probability exceeds the number."""
    steps = [
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k) if params.top_k else None,
        TopPLogitsWarper(params.top_p) if params.top_p is not None and params.top_p < 1 else None,
    ]
    scores = LogitsProcessorList([step for step in steps if step])(torch.empty(1, 0), logits[None].clone())[0]
    cumulative = scores.double().softmax(-1).cumsum(-1)
    return int((cumulative <= number * cumulative[-1]).sum())


OF_CODES = SamplingParams(temperature=1.0, top_k=TOP_K, top_p=TOP_P)


@torch.inference_mode()
def plain_rows(
    adapter: RowAdapter,
    prompt: list[int],
    tokens: int,
    params: SamplingParams,
    seed: int = 0,
    rows: torch.Tensor | None = None,
) -> list[list[int]]:
    """Row after row, each forward over the whole sequence. `rows`: conditioning of a conditioned adapter."""
    model, predictor = adapter.model, adapter.predictor
    greedy = not params.temperature
    model.set_attn_implementation("eager")
    try:
        embeds, out = model.model.embed_tokens(torch.tensor(prompt)), []
        while len(out) < tokens:
            hidden = model.model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0, -1]
            logits = model.lm_head(hidden).float()
            at = len(out)
            first = int(logits.argmax()) if greedy else _drawn(logits, uniforms(seed, at, 1)[0], params)
            row, state = [first], predictor.begin(hidden, torch.tensor(first))
            for group, number in enumerate(code_uniforms(seed, at, 1, GROUPS - 1)[0], 1):
                scores = state @ predictor.heads[group - 1]
                row.append(int(scores.argmax()) if greedy else _drawn(scores, number, OF_CODES))
                state = predictor.go_on(state, group, torch.tensor(row[-1]))
            out.append(row)
            step = model.model.embed_tokens(torch.tensor([first]))
            for group in range(1, GROUPS):
                step = step + predictor.embeds[group][torch.tensor([row[group]])]
            if rows is not None:
                step = step + rows[at]
            embeds = torch.cat([embeds, step])
        return out
    finally:
        model.set_attn_implementation(NAME)


def rows_driver(adapter: RowAdapter, *, ahead: bool = False, **config: Any) -> Driver:
    sizes = {"num_blocks": 64, "block_size": 8, **config}
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**sizes), ahead=ahead))


def codes(drive: Driver, name: str) -> list[list[int]]:
    """All rows of an output; they must belong to its tokens."""
    result = drive.results[name]
    rows = [row for output in result.outputs for row in output.codes]
    assert [row[0] for row in rows] == result.token_ids
    return rows


def prompt_of(prompt: list[int], **fields: Any) -> Prompt:
    return Prompt(list(prompt), **fields)
