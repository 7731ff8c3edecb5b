"""A tiny stage model that yields rows of numbers and stops by a score, and its answer frame by frame, without engine,
cache or batch."""

from __future__ import annotations

from typing import Any

import torch
from ar_adapter import HIDDEN, TinyAdapter, tiny_model

from segue.engines.autoregressive.contract import Draws, numbers_of
from segue.engines.autoregressive.sample.sampler import code_uniforms
from segue.kernels.attention.paged_attention import NAME

NUMBERS = 5
GO_ON, STOP = range(2)
NEVER = -1e30
THRESHOLD = 1.0


class NumberAdapter(TinyAdapter):
    """The numbers of a row are its noise, pushed along by the hidden state; its input is a projection of them."""

    groups = 1 + NUMBERS

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(tiny_model("qwen2", seed=seed), **options)
        generator = torch.Generator().manual_seed(seed)
        self.flow = torch.randn(HIDDEN, NUMBERS, generator=generator) * 0.3 * HIDDEN**-0.5
        self.into = torch.randn(NUMBERS, HIDDEN, generator=generator) * 0.15
        self.score = torch.randn(HIDDEN, generator=generator) * HIDDEN**-0.5
        self.vocab_size = 2
        self.end_token_ids = frozenset({STOP})
        self.vocabulary = None
        self.poisoned = False

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        if token_ids.ndim == 1:
            return self.model.model.embed_tokens(token_ids)
        return numbers_of(token_ids[:, 1:]) @ self.into

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        stops = hidden @ self.score > THRESHOLD
        return torch.stack([torch.where(stops, NEVER, 0.0), torch.where(stops, 0.0, NEVER)], dim=1)

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        numbers = draws.noise().float() + torch.tanh(hidden @ self.flow)
        return draws.codes_of(numbers * float("nan") if self.poisoned else numbers)


@torch.inference_mode()
def plain_numbers(adapter: NumberAdapter, prompt: list[int], most: int, temperature: float, seed: int) -> torch.Tensor:
    """[frames, NUMBERS]: up to the frame whose score stops."""
    model = adapter.model
    model.set_attn_implementation("eager")
    try:
        embeds, out = model.model.embed_tokens(torch.tensor(prompt)), []
        while len(out) < most:
            hidden = model.model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0, -1]
            uniform = torch.from_numpy(code_uniforms(seed, len(out), 1, NUMBERS)[0])
            noise = torch.distributions.Normal(0.0, 1.0).icdf(uniform) * temperature**0.5
            out.append(noise.float() + torch.tanh(hidden @ adapter.flow))
            if hidden @ adapter.score > THRESHOLD:
                break
            embeds = torch.cat([embeds, out[-1][None] @ adapter.into])
        return torch.stack(out)
    finally:
        model.set_attn_implementation(NAME)
