"""Tokens and texts that may not come, and text nobody wants."""

from __future__ import annotations

import pytest
from ar_adapter import VOCAB, Driver, TinyAdapter, generate, prompts, stage_request, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.sample.penalties import BadWords
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams, check_sampling

PROMPTS = prompts(3, (5, 33, 24))
TOKENS = 16
TEXT = frozenset({"text"})


@pytest.fixture(scope="module")
def adapter():
    return TinyAdapter(tiny_model("qwen2", seed=7))


@pytest.fixture(scope="module")
def answer(adapter):
    return generate(adapter.model, PROMPTS[0], TOKENS)


def driver(adapter, **config) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})))


def one(adapter, prompt=PROMPTS[0], resume=(), **sampling):
    drive = driver(adapter)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, **sampling})
    drive.add(stage_request("it", sampling=params, to_client=TEXT, resume=list(resume)), prompt)
    return drive.run()["it"]


def letters(tokens) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


# --- allowed tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_come(adapter, answer, temperature):
    drive = driver(adapter)
    for index, allowed in enumerate(([3, 50, 7, 50], None, [96])):
        params = SamplingParams(temperature=temperature, max_tokens=TOKENS, allowed_token_ids=allowed)
        drive.add(stage_request(f"r{index}", sampling=params, seed=4), PROMPTS[0])
    results = drive.run()
    assert len(set(results["r0"].token_ids)) > 1
    assert set(results["r0"].token_ids) <= {3, 50, 7}
    assert results["r2"].token_ids == [96] * TOKENS
    if not temperature:
        assert results["r1"].token_ids == answer


def test_allowed_is_suppressing_the_rest(adapter):
    allowed = list(range(0, VOCAB, 3))
    rest = [token for token in range(VOCAB) if token % 3]
    assert one(adapter, allowed_token_ids=allowed).token_ids == one(adapter, suppress_tokens=rest).token_ids


def test_a_request_that_forbids_everything_fails_alone(adapter, answer):
    adapter.end_token_ids = frozenset({5})
    try:
        drive = driver(adapter)
        stuck = SamplingParams(temperature=0.7, allowed_token_ids=[5], min_tokens=3, max_tokens=TOKENS)
        drive.add(stage_request("stuck", sampling=stuck), PROMPTS[0])
        drive.add(stage_request("fine", sampling=SamplingParams(temperature=0.0, max_tokens=5)), PROMPTS[0])
        results = drive.run()
    finally:
        adapter.end_token_ids = frozenset()
    error = results["stuck"].last.error
    assert isinstance(error, InvalidRequest)
    assert "forbid every token" in error.message
    assert results["fine"].token_ids == answer[:5]
    assert drive.engine.stats()["blocks_used"] == 0


# --- bad words -------------------------------------------------------------------------------------------------------


def test_a_bad_word_of_one_token(adapter, answer):
    letter = letters([answer[4]])
    result = one(adapter, bad_words=[letter])
    place = answer.index(answer[4])
    assert result.token_ids[:place] == answer[:place]
    assert answer[4] not in result.token_ids


def test_a_bad_word_of_several_tokens(adapter, answer):
    """Only its last token is forbidden, and only behind the others."""
    word = letters(answer[3:6])
    result = one(adapter, bad_words=[word])
    assert result.token_ids[:5] == answer[:5]
    assert result.token_ids[5] != answer[5]
    assert word not in result.text
    resumed = one(adapter, bad_words=[word], resume=answer[:5])
    assert resumed.token_ids == result.token_ids


def test_bad_words_count_the_output_only(adapter, answer):
    word = letters([PROMPTS[0][-1], answer[0]])
    assert one(adapter, bad_words=[word]).token_ids == answer


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_what_is_forbidden(words, output):
    rule = BadWords(words)
    for token in output:
        rule.saw(token)
    expected = {
        word[-1]
        for word in words
        if output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1
    }
    assert rule.forbidden() == expected


def test_bad_words_have_an_end():
    """They are tokenized by the stage itself."""
    check_sampling(SamplingParams(bad_words=["a" * 64] * 1024), "here")
    for words, says in (
        (["a"] * 1025, "at most 1024 are taken"),
        (["a" * (1 << 15)] * 2 + ["a"], "65537 bytes; at most 65536 are taken"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            check_sampling(SamplingParams(bad_words=words), "here")
        assert caught.value.field == "here.bad_words"


def test_bad_words_need_a_tokenizer(adapter):
    bare = TinyAdapter(adapter.model)
    bare.vocabulary = None
    with pytest.raises(InvalidRequest, match=r"sampling\.main\.bad_words is set, but stage 'main' has no tokenizer"):
        driver(bare).add(stage_request("it", sampling=SamplingParams(bad_words=["a"])), PROMPTS[0])


# --- no text ---------------------------------------------------------------------------------------------------------


def test_without_text(adapter, answer):
    result = one(adapter, detokenize=False)
    assert (result.text, result.token_ids) == ("", answer)
