"""Sampling through the whole system: what transformers draws when it is given the same random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from truth_system import BY_NAME, WITHIN, Case, System, Truth, assert_equals, longer

from segue.engines.autoregressive.sample.sampler import uniforms
from segue.messages.sampling import SamplingParams


class Draws:
    """Stands in for `torch.multinomial`: the draws of a request's seed, counted per `generate` of a stage."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.count = 0
        self.kept: list[int] = []
        """How many tokens were possible, per draw."""

    def multinomial(self, weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert weights.shape[0] == num_samples == 1
        cumulative = weights.double().cumsum(dim=-1)
        [number] = uniforms(self.seed, self.count, 1)
        target = number * cumulative[:, -1:]
        self.count += 1
        self.kept.append(int((weights > 0).sum()))
        return torch.searchsorted(cumulative, target, right=True)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch, truth: Truth) -> Draws:
    """The reference draws as a request of seed 5 does."""
    draws = Draws(5)
    monkeypatch.setattr(torch, "multinomial", draws.multinomial)
    for part in (truth.reference.model.thinker, truth.reference.model.talker):
        plain = part.generate

        def from_the_start(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            draws.count = 0
            return plain(*args, **kwargs)

        monkeypatch.setattr(part, "generate", from_the_start)
    return draws


@pytest.mark.parametrize(
    ("thinker", "talker"),
    [
        ({"temperature": 0.9}, {}),
        ({"temperature": 0.7, "top_k": 12, "top_p": 0.9}, {"temperature": 0.6, "top_k": 7}),
        ({"temperature": 1.3, "min_p": 0.1, "repetition_penalty": 1.2}, {"top_p": 0.5, "repetition_penalty": 1.3}),
    ],
    ids=["defaults", "top-k and top-p", "min-p and penalty"],
)
@pytest.mark.parametrize("name", ["text", pytest.param("image", marks=pytest.mark.nightly)])
def test_sampled_as_transformers_would(
    system: System,
    truth: Truth,
    assets: Path,
    draws: Draws,
    name: str,
    thinker: dict[str, Any],
    talker: dict[str, Any],
) -> None:
    """What is unset takes the defaults of `generate`: for the talker top-k 40, top-p 0.8, temperature 0.9, repetition
    penalty 1.05."""
    case = longer(BY_NAME[name], seed=5)
    settings = {f"thinker_{key}": value for key, value in thinker.items()}
    settings |= {f"talker_{key}": value for key, value in talker.items()}
    reply = truth.fresh(case, thinker_do_sample=True, talker_do_sample=True, **settings)
    assert max(draws.kept) > 5
    [output] = system.ask(
        case.prompt(
            assets,
            sampling={
                "thinker": SamplingParams(max_tokens=case.tokens, **thinker),
                "talker": SamplingParams(max_tokens=case.codes, **talker),
            },
        )
    )
    assert_equals(output, reply, truth.reference, within=WITHIN[1])


def test_other_seeds_draw_other_tokens_and_equal_ones_the_same(system: System, assets: Path) -> None:
    """Parallel samples of one prompt, as `n` makes them."""
    case: Case = BY_NAME["text"]
    warm = {"thinker": SamplingParams(temperature=0.9, max_tokens=24), "talker": SamplingParams(max_tokens=30)}
    seeds = [1, 2, 3, 4, 1]
    outputs = system.ask(*(case.prompt(assets, seed=seed, sampling=warm) for seed in seeds))
    assert len({tuple(output.token_ids["thinker"]) for output in outputs}) == 4
    assert outputs[0].token_ids == outputs[4].token_ids
    alone = [system.ask(case.prompt(assets, seed=seed, sampling=warm))[0] for seed in seeds[:4]]
    assert [output.token_ids for output in outputs[:4]] == [output.token_ids for output in alone]


def test_a_stages_own_seed_is_its_own(system: System, assets: Path) -> None:
    case = BY_NAME["text"]

    def warm(seed: int | None) -> dict[str, SamplingParams]:
        return {"thinker": SamplingParams(temperature=0.9, max_tokens=24, seed=seed)}

    one, other, same = system.ask(
        case.prompt(assets, seed=1, sampling=warm(None)),
        case.prompt(assets, seed=2, sampling=warm(None)),
        case.prompt(assets, seed=2, sampling=warm(1)),
    )
    assert one.token_ids["thinker"] == same.token_ids["thinker"] != other.token_ids["thinker"]


def test_without_a_seed_every_request_gets_another(system: System, assets: Path) -> None:
    case = BY_NAME["text"]
    warm = {"thinker": SamplingParams(temperature=0.9, max_tokens=24)}
    prompt = case.prompt(assets, seed=None, modalities=["text"], sampling=warm)
    outputs = system.ask(prompt, prompt)
    assert outputs[0].token_ids != outputs[1].token_ids
