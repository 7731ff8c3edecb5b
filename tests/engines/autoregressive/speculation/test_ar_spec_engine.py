"""Speculation in the engine: whatever a drafter says, tokens are those of plain sampling and the books are right."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import spec_kinds
import torch
from ar_adapter import ConditionedAdapter, TinyAdapter, generate, stage_request, tiny_model
from ar_speculation import CONDITIONS, PROMPTS, SAMPLINGS, TOKENS, Prophet, plainly, serve, speculating
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.contract import Prompt
from segue.messages.errors import StageFailed
from segue.messages.sampling import SamplingParams

GREEDY = SAMPLINGS["greedy"]
TEXT = frozenset({"text"})
adapter, answers = spec_kinds.adapter, spec_kinds.answers


def letters(tokens) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


def counts(drive) -> tuple[float, float]:
    stats = drive.engine.stats()
    return stats["spec_draft_tokens_total"], stats["spec_accepted_tokens_total"]


# --- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_tokens_equal_plain_ones(adapter, condition, sampling):
    plain = serve(plainly(adapter), sampling)
    assert condition(adapter, lambda: Prophet(plain, truth=0.7), sampling) == plain


def test_greedy_equals_the_library(adapter, answers):
    assert serve(speculating(adapter, Prophet(answers, truth=0.8)), GREEDY) == answers


def test_true_drafts_save_steps_and_false_ones_cost_none(adapter, answers):
    steps = {}
    for truth in (0.0, 1.0):
        drive = speculating(adapter, Prophet(answers, truth))
        before = len(adapter.forwards)
        assert serve(drive, GREEDY) == answers
        steps[truth] = len(adapter.forwards) - before
        drafted, accepted = counts(drive)
        assert drafted > 0
        assert accepted == (drafted if truth else 0)
    assert steps[0.0] == TOKENS
    assert steps[1.0] == 1 + -(-(TOKENS - 1) // 5)


def test_some_are_taken_and_others_refused(adapter, answers):
    """Equal tokens prove something only if there were drafts of both kinds."""
    drive = speculating(adapter, Prophet(answers, truth=0.7))
    assert serve(drive, GREEDY) == answers
    drafted, accepted = counts(drive)
    assert 0 < accepted < drafted


liars = st.fixed_dictionaries(
    {
        "truth": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "most": st.integers(0, 9),
        "extra": st.integers(0, 3),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    liars,
    st.integers(11, 30),
    st.integers(1, 5),
    st.sampled_from([3, 9, 40, 512]),
    st.integers(1, 8),
    st.sampled_from(sorted(SAMPLINGS)),
)
def test_liars_change_nothing(lies, num_blocks, max_batch, max_tokens_per_step, tokens, which):
    adapter, sampling = _LIED_TO, SAMPLINGS[which]
    plain = _plain(which)
    drive = speculating(
        adapter,
        Prophet(plain, **lies),
        tokens=tokens,
        num_blocks=num_blocks,
        max_batch=max_batch,
        max_tokens_per_step=max_tokens_per_step,
    )
    assert serve(drive, sampling) == plain
    drafted, accepted = counts(drive)
    assert 0 <= accepted <= drafted


_LIED_TO = TinyAdapter(tiny_model("llama", seed=3, num_hidden_layers=1))
_PLAIN: dict[str, list[list[int]]] = {}


def _plain(which: str) -> list[list[int]]:
    if which not in _PLAIN:
        _PLAIN[which] = serve(plainly(_LIED_TO), SAMPLINGS[which])
    return _PLAIN[which]


def test_draws_follow_the_target_distribution(adapter):
    """Chi-square of pairs of tokens over many seeds, against plain sampling of as many others (two samples)."""
    sampling = SamplingParams(temperature=0.7, top_k=4, max_tokens=3)
    count = 1500

    def pairs(drive, seeds) -> Counter:
        for seed in seeds:
            drive.add(stage_request(f"s{seed}", sampling=sampling, seed=seed), PROMPTS[0])
        results = drive.run(20_000)
        return Counter(tuple(results[f"s{seed}"].token_ids[:2]) for seed in seeds)

    likely = generate(adapter.model, PROMPTS[0], 3)
    drive = speculating(adapter, Prophet([likely]), num_blocks=512, max_batch=256, max_tokens_per_step=4096)
    ours = pairs(drive, range(count))
    drafted, accepted = counts(drive)
    assert 0.05 * drafted < accepted < 0.95 * drafted, "both ways must be taken"
    plain = pairs(plainly(adapter, num_blocks=512, max_batch=256, max_tokens_per_step=4096), range(count, 2 * count))
    common = [pair for pair in ours | plain if ours[pair] + plain[pair] >= 10]
    assert len(common) > 6
    chi2 = sum((ours[pair] - plain[pair]) ** 2 / (ours[pair] + plain[pair]) for pair in common)
    freedom = len(common)
    # Wilson and Hilferty (1931); 3.72 is the 1e-4 quantile
    assert ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5 < 3.72


def test_logprobs_and_bad_words_are_those_of_plain_steps(adapter, answers):
    """Told beside each token, accepted or drawn; and forbidden after drafts as after tokens."""
    for more in ({"logprobs": 3}, {"bad_words": [letters(answers[1][3:5])]}):
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, **more)
        plain, drive = plainly(adapter), speculating(adapter, Prophet(answers, truth=0.8))
        assert serve(plain, sampling, to_client=TEXT) == serve(drive, sampling, to_client=TEXT)
        ours, theirs = (
            [row for output in each.results["r1"].outputs for row in output.logprobs] for each in (drive, plain)
        )
        assert [row.chosen.token_id for row in ours] == [row.chosen.token_id for row in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert [token.token_id for token in one.top] == [token.token_id for token in other.top]
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
        assert (len(ours) == TOKENS) == ("logprobs" in more)
        assert (drive.results["r1"].token_ids == answers[1]) == ("logprobs" in more)


def test_nothing_left_to_choose_after_a_draft(adapter, answers):
    """Where a bad word forbids the only allowed token, the request fails at that place, not earlier."""
    first = answers[1][0]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, allowed_token_ids=[first], bad_words=[letters([first] * 3)]
    )
    outcomes = []
    for each in (plainly(adapter), speculating(adapter, Stubborn([[], [first] * TOKENS]))):
        each.add(stage_request("it", sampling=sampling), PROMPTS[1])
        each.run()
        outcomes.append((each.results["it"].token_ids, str(each.results["it"].last.error)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == [first, first]
    assert "forbid every token" in outcomes[0][1]


@pytest.mark.parametrize("more", [{"n": 3}, {"n": 2, "best_of": 3}, {"beam_width": 3, "temperature": 0.0}])
def test_several_outputs_are_those_of_plain_steps(adapter, more):
    """Forks draft each for itself; beams do not."""
    sampling = SamplingParams(**{"temperature": 0.9, "max_tokens": 12, **more})
    given = []
    for drive in (plainly(adapter), speculating(adapter, Stubborn([[], [5, 6, 7] * TOKENS]), tokens=3)):
        request = stage_request("it", sampling=sampling, seed=5, to_client=TEXT)
        drive.engine.add(request)
        drive.engine.feed("it", "input", {"prompt": Prompt(list(PROMPTS[1]))}, final=True)
        tokens: dict[int, list[int]] = {}
        while drive.engine.has_work():
            for output in drive.engine.step():
                tokens.setdefault(output.index, []).extend(output.token_ids)
            drive.engine.audit()
        given.append(tokens)
        assert drive.engine.stats()["blocks_used"] == 0
    assert given[0] == given[1]
    assert (counts(drive)[0] > 0) == ("beam_width" not in more)


# --- ends in the middle of accepted drafts ---------------------------------------------------------------------------


@pytest.mark.parametrize("most", range(1, 8))
def test_max_tokens_in_the_middle(adapter, answers, most):
    drive = speculating(adapter, Prophet(answers, most=9, extra=5), tokens=9)
    drive.add(stage_request("it", sampling=SamplingParams(temperature=0.0, max_tokens=most)), PROMPTS[1])
    result = drive.run()["it"]
    assert result.token_ids == answers[1][:most]
    assert result.last.finish_reason == "length"
    assert drive.engine.stats()["generated_tokens_total"] == most


@pytest.mark.parametrize("place", range(1, 7))
def test_stop_token_in_the_middle(adapter, answers, place):
    stop = SamplingParams(temperature=0.0, max_tokens=TOKENS, stop_token_ids=[answers[1][place]])
    drive = speculating(adapter, Prophet(answers, most=9), tokens=9)
    drive.add(stage_request("it", sampling=stop, to_client=TEXT), PROMPTS[1])
    result = drive.run()["it"]
    end = answers[1].index(answers[1][place])
    assert result.token_ids == answers[1][: end + 1]
    assert result.text == letters(answers[1][:end])
    assert result.last.finish_reason == "stop"
    assert drive.engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize("place", range(1, 7))
def test_stop_string_in_the_middle(adapter, answers, place):
    text = letters(answers[1])
    stop = text[place : place + 2]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, stop=[stop])
    drive = speculating(adapter, Prophet(answers, most=9), tokens=9)
    drive.add(stage_request("it", sampling=sampling, to_client=TEXT), PROMPTS[1])
    result = drive.run()["it"]
    assert result.text == text[: text.index(stop)]
    assert result.token_ids == answers[1][: text.index(stop) + 2]


def test_the_context_is_full_in_the_middle(answers):
    adapter = TinyAdapter(tiny_model("qwen2", seed=7), max_model_len=len(PROMPTS[2]) + 9)
    drive = speculating(adapter, Prophet(answers, most=9, extra=9), tokens=9, num_blocks=6)
    drive.add(stage_request("it", sampling=SamplingParams(temperature=0.0)), PROMPTS[2])
    result = drive.run()["it"]
    assert result.token_ids == answers[2][:9]
    assert result.last.finish_reason == "length"


# --- what leaves the engine, what stays in it ------------------------------------------------------------------------


def test_captured_rows_are_those_of_plain_steps(answers):
    adapter = TinyAdapter(tiny_model("qwen2", seed=7), capture=True)
    wanted = {"downstreams": frozenset({"talker"})}
    stop = SamplingParams(temperature=0.0, max_tokens=TOKENS, stop_token_ids=[answers[2][9]])
    for sampling in (GREEDY, stop):
        plain, drive = plainly(adapter), speculating(adapter, Prophet(answers, truth=0.8), tokens=6)
        assert serve(plain, sampling, **wanted) == serve(drive, sampling, **wanted)
        for index in range(5):
            ours, theirs = drive.results[f"r{index}"].rows(), plain.results[f"r{index}"].rows()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rejected_drafts_are_never_found_in_the_prefix_cache(adapter, answers):
    """A prompt that goes on as the liar said finds the blocks of the truth only."""
    lie = [token + 1 for token in answers[1]]
    drive = speculating(adapter, Stubborn([[], lie]), block_size=2, num_blocks=128, tokens=6)
    assert serve(drive, GREEDY, which=[1]) == [answers[1]]
    drafted, accepted = counts(drive)
    assert (drafted > 60, accepted) == (True, 0)
    prompt = [*PROMPTS[1], *lie[:8]]
    drive.add(stage_request("other", sampling=GREEDY), prompt)
    result = drive.run()["other"]
    assert result.outputs[0].cached_tokens <= len(PROMPTS[1])
    assert result.token_ids == generate(adapter.model, prompt, TOKENS)


def test_blocks_of_rejected_drafts_go_back(adapter, answers):
    lie = [token + 1 for token in answers[1]]
    drive = speculating(adapter, Stubborn([[], lie]), block_size=1, num_blocks=64, tokens=6)
    drive.add(stage_request("it", sampling=GREEDY), PROMPTS[1])
    for done in range(3):
        drive.step()
        assert drive.engine.stats()["blocks_used"] == len(PROMPTS[1]) + done


def test_nobody_is_preempted_for_drafts(adapter, answers):
    """The pool holds both requests to their ends and not a token more."""
    blocks = len(PROMPTS[1]) + len(PROMPTS[3]) + 2 * (TOKENS - 1)
    drive = speculating(adapter, Prophet(answers, truth=0.5), block_size=1, num_blocks=blocks, tokens=6)
    assert serve(drive, GREEDY, which=[1, 3]) == [answers[1], answers[3]]
    assert drive.engine.stats()["preemptions_total"] == 0
    assert counts(drive)[0] > 0


def test_nan_after_a_false_draft_harms_nobody(adapter, answers):
    """The poisoned token is proposed and rejected; what its rows left in the cache must not spoil what follows."""
    known = {token for tokens in (*PROMPTS, *answers) for token in tokens}
    adapter.poison = poison = next(token for token in range(97) if token not in known)
    try:
        wrong = [[*answer[:2], poison, 5, *answer[4:]] for answer in answers]
        for block_size in (8, 4):
            drive = speculating(adapter, Stubborn(wrong), block_size=block_size, num_blocks=128, tokens=6)
            assert serve(drive, GREEDY) == answers
            assert counts(drive)[0] > 0
    finally:
        adapter.poison = None


class Stubborn(Prophet):
    """Says what it thinks stands there, whether it was right so far or not."""

    def _guess(self, entry):
        for prompt, known in zip(PROMPTS, self.known, strict=False):
            if list(entry.ids[: len(prompt)]) == prompt:
                return known[len(entry.ids) :][:6]
        return []


def test_nan_at_an_accepted_draft_fails_as_without_drafts(adapter, answers):
    adapter.poison = answers[1][4]
    try:
        plain, drive = plainly(adapter), speculating(adapter, Prophet(answers), tokens=8)
        for each in (plain, drive):
            each.add(stage_request("it", sampling=GREEDY), PROMPTS[1])
            each.run()
        end = answers[1].index(answers[1][4])
        for each in (plain, drive):
            assert each.results["it"].token_ids == answers[1][: end + 1]
            assert isinstance(each.results["it"].last.error, StageFailed)
    finally:
        adapter.poison = None


# --- who speculates --------------------------------------------------------------------------------------------------


def test_a_request_can_opt_out(adapter, answers):
    prophet = Prophet(answers)
    drive = speculating(adapter, prophet)
    assert serve(drive, GREEDY, opted_out=range(5)) == answers
    assert prophet.asked == 0
    assert counts(drive) == (0, 0)


def test_conditioned_stages_do_not_speculate():
    adapter = ConditionedAdapter(tiny_model("qwen2", seed=7))
    prophet = Prophet([])
    drive = speculating(adapter, prophet)
    drive.add(stage_request("it", sampling=GREEDY), Prompt(PROMPTS[0]), tail=torch.zeros(48), rows=torch.zeros(2, 48))
    assert len(drive.run()["it"].token_ids) == TOKENS
    assert prophet.asked == 0


def test_a_drafter_that_raises_disables_only_itself(adapter, answers, caplog):
    class Bomb(Prophet):
        def propose(self, wanted):
            if self.asked == 3:
                raise RuntimeError("no more ideas")
            return super().propose(wanted)

    bomb = Bomb(answers, most=1)
    drive = speculating(adapter, bomb)
    with caplog.at_level(logging.ERROR):
        assert serve(drive, GREEDY) == answers
    assert "speculation is off: the drafter failed: RuntimeError: no more ideas" in caplog.text
    assert (bomb.asked, drive.engine.stats()["spec_active"]) == (3, 0.0)


def test_a_drafter_that_answers_for_others_is_off(adapter, answers, caplog):
    class Short(Prophet):
        def propose(self, wanted):
            self.asked += 1
            return []

    short = Short(answers)
    with caplog.at_level(logging.ERROR):
        assert serve(speculating(adapter, short), GREEDY) == answers
    assert short.asked == 1


def test_finished_and_cancelled_requests_are_forgotten(adapter, answers):
    prophet = Prophet(answers)
    drive = speculating(adapter, prophet)
    for index in range(5):
        drive.add(stage_request(f"r{index}", sampling=GREEDY), PROMPTS[index])
    drive.step()
    drive.step()
    assert len(prophet.keys) == 5
    drive.engine.cancel("r2")
    assert prophet.keys == {"r0", "r1", "r3", "r4"}
    drive.run()
    assert prophet.keys == set()


def test_engines_without_speculation_report_the_same_figures(adapter):
    plain, ours = plainly(adapter).engine.stats(), speculating(adapter, Prophet([])).engine.stats()
    assert list(plain) == list(ours)
    assert (plain["spec_active"], ours["spec_active"]) == (0.0, 1.0)
    assert plain["spec_switched_off_total"] == ours["spec_switched_off_total"] == 0.0


def test_it_switches_itself_off_where_it_does_not_pay(adapter, answers):
    """Hopeless drafts: after the first verdict there are long rests."""
    drive = speculating(adapter, _Fool(), adaptive=True)
    drive.add(stage_request("it", sampling=SamplingParams(temperature=0.0, max_tokens=150)), PROMPTS[0])
    tokens = drive.run()["it"].token_ids
    assert tokens == generate(adapter.model, PROMPTS[0], 150)
    drafted, accepted = counts(drive)
    assert 8 <= drafted <= 3 * 8 + 8
    assert accepted < drafted
    assert 1 <= drive.engine.stats()["spec_switched_off_total"] <= 3


class _Fool(Prophet):
    def __init__(self) -> None:
        super().__init__([])

    def _guess(self, entry):
        return [0]
