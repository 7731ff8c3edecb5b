"""The sampler against transformers' processors, exact distributions, and itself in other batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from segue.engines.autoregressive.sample.penalties import apply_rules
from segue.engines.autoregressive.sample.sampler import RowSampler, filtered, sample, uniforms
from segue.messages.sampling import SamplingParams

VOCAB = 61


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def row(params: SamplingParams, *, seed: int = 0, prompt=(), output=(), vocab: int = VOCAB, ends=()) -> RowSampler:
    sampler = RowSampler.of(params, seed, prompt, vocab, ends)
    for token in output:
        sampler.saw(token)
    return sampler


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.9, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.05, 1.5]),
    suppress_tokens=st.sampled_from([[], [3, 9]]),
    logit_bias=st.sampled_from([{}, {4: 5.0, 7: -3.0}]),
)


def library(params: SamplingParams, seen: list[int], scores: torch.Tensor) -> torch.Tensor:
    """The same processors, in the order of transformers' `_get_logits_processor`."""
    bias = {(token,): value for token, value in (params.logit_bias or {}).items()}
    steps = [
        SequenceBiasLogitsProcessor(bias) if bias else None,
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        SuppressTokensLogitsProcessor(params.suppress_tokens) if params.suppress_tokens else None,
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k) if params.top_k > 0 else None,
        TopPLogitsWarper(params.top_p) if params.top_p < 1 else None,
        MinPLogitsWarper(params.min_p) if params.min_p else None,
    ]
    return LogitsProcessorList([step for step in steps if step])(torch.tensor([seen]), scores.clone())


@settings(max_examples=150, deadline=None)
@given(st.lists(params, min_size=1, max_size=5), st.integers(0, 1000))
def test_filtering_equals_transformers(batch, seed):
    scores = logits(len(batch), seed)
    seen = [[index, 5, 5, 60, index + 20] for index in range(len(batch))]
    rows = [row(each, prompt=ids[:3], output=ids[3:]) for each, ids in zip(batch, seen, strict=True)]
    ours = scores.clone()
    apply_rules(ours, [each.rules for each in rows], [2] * len(rows))
    ours = filtered(ours, rows)
    for index, each in enumerate(batch):
        theirs = library(each, seen[index], scores[index : index + 1])[0]
        assert torch.equal(ours[index].isinf(), theirs.isinf())
        torch.testing.assert_close(ours[index], theirs, rtol=1e-5, atol=1e-5)


def test_nucleus_beyond_the_first_look():
    """A flat distribution over a large vocabulary: top-p needs more than the most likely few hundred."""
    scores = logits(2, vocab=9000) * 0.05
    wanted = [SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=1.0, top_p=0.3)]
    ours = filtered(scores.clone(), [row(each, vocab=9000) for each in wanted])
    for index, each in enumerate(wanted):
        theirs = TopPLogitsWarper(each.top_p)(None, scores[index : index + 1])[0]
        assert (ours[index].isinf() != theirs.isinf()).sum() <= 1  # the border itself may fall either way by rounding
        assert ours[index].isfinite().sum() > 2000


def test_equals_at_the_border_are_all_kept():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = filtered(scores, [row(SamplingParams(temperature=1.0, top_k=2), vocab=5)])
    assert kept.isfinite().tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize(
    "given_params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=7),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05),
    ],
)
def test_draws_follow_the_filtered_softmax(given_params):
    """Chi-square over 20 000 draws, at the 1e-4 level; tokens outside the filter never come."""
    count, scores = 20_000, logits(1, 3)
    exact = (
        library(
            given_params.over(
                SamplingParams(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, suppress_tokens=[], logit_bias={})
            ),
            [5],
            scores,
        )
        .softmax(-1)[0]
        .double()
        .numpy()
    )
    chosen = row(given_params, seed=77, prompt=[5])
    drawn = np.array(
        [
            token
            for start in range(0, count, 1000)
            for token in sample(scores.repeat(1000, 1), [chosen] * 1000, range(start, start + 1000))
        ]
    )
    observed = np.bincount(drawn, minlength=VOCAB)
    assert not observed[exact == 0].any()
    common = exact * count >= 5
    expected = np.append(exact[common], exact[~common].sum()) * count
    seen = np.append(observed[common], observed[~common].sum())
    if expected[-1] < 5:
        expected, seen = expected[:-1], seen[:-1]
    chi2 = ((seen - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson and Hilferty (1931): the cube root of chi2 / freedom is nearly normal; 3.72 is the 1e-4 quantile
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.72


def test_a_draw_depends_only_on_seed_and_index():
    scores = logits(6, 4)
    mixed = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=9),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(temperature=1.5, min_p=0.1),
    ]
    rows = [row(each, seed=index * 11, prompt=[1, 2, 3]) for index, each in enumerate(mixed)]
    for index in range(30):
        together = sample(scores.clone(), rows, [index] * len(rows))
        alone = [sample(scores[r : r + 1].clone(), [rows[r]], [index])[0] for r in range(len(rows))]
        backwards = sample(scores.flip(0), rows[::-1], [index] * len(rows))[::-1]
        assert together == alone == backwards
    assert len({*uniforms(1, 0, 100), *uniforms(2, 0, 100)}) == 200
    assert 0.0 <= min(uniforms(9, 0, 1000)) < 0.01
    assert row(mixed[0], seed=-1).seed == 2**64 - 1


def test_draws_are_those_of_earlier_releases():
    """A request with a seed gives the same tokens after an update; the order in which numbers are asked for, and how
    many are computed at once, does not matter."""
    drawn = {
        (0, 0): 0.011546754286331562,
        (0, 1): 0.5023796042735054,
        (7, 63): 0.5909255328536647,
        (7, 64): 0.23743123221297913,
        (2**64 - 1, 12345): 0.6417259393325557,
    }
    rows = {seed: row(SamplingParams(temperature=1.0), seed=seed) for seed, _ in drawn}
    for (seed, index), number in [*drawn.items(), *reversed(drawn.items())]:
        assert rows[seed].draw(index) == rows[seed].after([5]).draw(index) == number
        assert uniforms(seed, index, 1) == [number]
    assert [rows[7].draw(index) for index in range(130)] == uniforms(7, 0, 130)


def test_presence_and_frequency_count_the_output_only():
    scores = torch.zeros(1, VOCAB)
    chosen = row(
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25),
        prompt=[1, 1],
        output=[2, 2, 2, 3],
    )
    apply_rules(scores, [chosen.rules], [4])
    assert scores[0, :5].tolist() == [0.0, 0.0, -1.25, -0.75, 0.0]


def test_ends_are_forbidden_until_min_tokens():
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[8])
    chosen = row(params, ends={9})
    scores = torch.zeros(1, VOCAB)
    scores[0, 9], scores[0, 8], scores[0, 4] = 5.0, 4.0, 3.0
    assert [sample(scores.clone(), [chosen], [done])[0] for done in (0, 1, 2)] == [4, 4, 9]
    ignoring = row(SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True), ends={9})
    assert sample(scores.clone(), [ignoring], [0]) == [8], "who asks for so many tokens wants no end among them"
    assert sample(scores.clone(), [ignoring], [2]) == [9]


def test_ids_outside_the_vocabulary_do_no_harm():
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, suppress_tokens=[VOCAB + 5], logit_bias={10_000: 1.0, 2: 50.0}
    )
    assert sample(logits(1), [row(params, prompt=[0, VOCAB, 99_999])], [0]) == [2]


def test_seen_tokens_grow():
    """More distinct tokens than the first allocation holds."""
    many = list(range(300))
    scores = logits(1, vocab=400).abs() + 1
    expected = scores.clone()
    expected[0, :300] /= 2
    chosen = row(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=many[:10], output=many[10:], vocab=400)
    apply_rules(scores, [chosen.rules], [290])
    assert torch.equal(scores, expected)
