"""Input in pieces: appended equals sent at once, only what is new is computed, and holding costs others nothing."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from ar_adapter import VOCAB, Driver, prompts, stage_request, tiny_model
from ar_open import END, HOLD, TURN, OpenAdapter, answer, append, close, open_request, turns_of
from ar_rows import RowAdapter
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Fed, Prompt, Then
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.hold import Pieces
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.contract import Payload
from segue.messages.errors import InvalidRequest, StageFailed, TooLong
from segue.messages.sampling import SamplingParams, turn_seed
from segue.messages.units import TurnEnd, Unit

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
DRAWN = SamplingParams(temperature=1.0, top_k=20, max_tokens=6)
PENALISED = SamplingParams(temperature=1.0, top_k=20, presence_penalty=0.5, max_tokens=6)
LONG, MATE = prompts(2, (90, 33))
SIZES = {"num_blocks": 64, "block_size": 4}


@cache
def adapter() -> OpenAdapter:
    model = OpenAdapter(tiny_model())
    model.end_token_ids = frozenset(range(0, VOCAB, 9))  # turns end by themselves, at lengths that depend on the input
    return model


@cache
def alone() -> Driver:
    """Serves one request after the other, without a prefix cache."""
    return driver(prefix_caching=False)


def driver(model: OpenAdapter | None = None, *, ahead: bool = False, **config: object) -> Driver:
    sizes = {**SIZES, **config}
    return Driver(AutoregressiveEngine(model or adapter(), AutoregressiveConfig(**sizes), ahead=ahead))


def expected(turns: list[list[int]], sampling: SamplingParams, seed: int = 0) -> list[list[int]]:
    """Each turn as a request of its own, whose prompt is all that came before."""
    said: list[int] = []
    answers = []
    for number, tokens in enumerate(turns):
        said += tokens
        answers.append(answer(alone(), said, sampling, seed, number))
        said += answers[-1]
    return answers


def assert_empty(drive: Driver) -> None:
    stats = drive.engine.stats()
    assert (stats["blocks_used"], stats["running"], stats["waiting"], stats["holding"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_pieces_equal_the_whole_and_each_token_is_computed_once(ahead: bool) -> None:
    model = adapter()
    [whole] = expected([LONG[:30]], DRAWN, seed=5)
    drive = driver(ahead=ahead, prefix_caching=False)
    drive.engine.add(open_request("r", seed=5, sampling=DRAWN))
    model.forwards.clear()
    for begin, stop in ((0, 1), (1, 13), (13, 14), (14, 29)):
        append(drive, "r", LONG[begin:stop])
        drive.run()
        assert sum(model.forwards) == stop - 1  # all but the newest, whose logits nobody wants yet
        assert drive.engine.stats()["holding"] == 1
        assert drive.engine.stats()["held_blocks"] == -(-(stop - 1) // 4)
    append(drive, "r", LONG[29:30])
    close(drive, "r")
    drive.run()
    assert drive.results["r"].token_ids == whole
    assert sum(model.forwards) == 30 + len(whole) - 1 + (ahead and len(whole) < 6)  # one step ahead of an end token
    first, *_ = drive.results["r"].outputs
    assert [output.prompt_tokens for output in drive.results["r"].outputs if output.prompt_tokens] == [13, 14, 29, 30]
    assert first.first_index == 0
    assert_empty(drive)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_turn_goes_on_where_the_last_one_ended(ahead: bool, early: bool) -> None:
    pieces = [LONG[:9], LONG[9:12], LONG[12:31]]
    answers = expected(pieces, DRAWN, seed=3)
    assert len({len(tokens) for tokens in answers}) > 1  # by an end token, and by length
    drive = driver(ahead=ahead)
    drive.engine.add(open_request("r", seed=3, sampling=DRAWN))
    for piece in pieces:
        append(drive, "r", piece, TURN)
        if not early:
            drive.run()
    drive.run()
    assert turns_of(drive, "r") == answers
    ends = [output for output in drive.results["r"].outputs if output.turn_ended]
    assert [end.finish_reason for end in ends] == ["length" if len(ids) == 6 else "stop" for ids in answers]
    assert drive.engine.stats()["running"] == 1
    close(drive, "r")
    drive.run()
    last = drive.results["r"].last
    assert (last.finished, last.finish_reason, last.token_ids) == (True, ends[-1].finish_reason, [])
    assert_empty(drive)


PLANS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3)
"""Turns, each in pieces of so many tokens."""


@settings(max_examples=30)
@given(
    plan=PLANS,
    steps=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    closes=st.booleans(),
    sampling=st.sampled_from([GREEDY, DRAWN, PENALISED]),
    seed=st.integers(0, 3),
    blocks=st.integers(16, 30),
    per_step=st.integers(3, 40),
    caching=st.booleans(),
    ahead=st.booleans(),
    mates=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 50), st.booleans()), max_size=4),
    paused=st.integers(0, 8),
)
def test_however_it_is_split(
    plan: list[list[int]],
    steps: list[int],
    closes: bool,
    sampling: SamplingParams,
    seed: int,
    blocks: int,
    per_step: int,
    caching: bool,
    ahead: bool,
    mates: list[tuple[int, int, bool]],
    paused: int,
) -> None:
    """Any split, any batch mates, preempted and found in the prefix cache or not: the units are those of requests of
    their own, and no block is left."""
    sums = [sum(lengths) for lengths in plan]
    said = [LONG[sum(sums[:turn]) : sum(sums[: turn + 1])] for turn in range(len(plan))]
    drive = driver(num_blocks=blocks, max_tokens_per_step=per_step, prefix_caching=caching, ahead=ahead, max_batch=3)
    drive.engine.add(open_request("r", seed=seed, sampling=sampling))
    pieces, at = [], 0
    for lengths in plan:
        for place, length in enumerate(lengths):
            pieces.append((LONG[at : at + length], TURN if place == len(lengths) - 1 else HOLD))
            at += length
    if not closes:  # the last piece says that it is the last
        pieces[-1] = (pieces[-1][0], END)
    waits = iter(steps)
    for number, (tokens, then) in enumerate(pieces):
        for mate, (when, length, alike) in enumerate(mates):
            if when == number:
                prompt = (LONG if alike else MATE * 2)[:length]
                drive.add(stage_request(f"mate{mate}", sampling=GREEDY), prompt)
        append(drive, "r", tokens, then)
        if number == paused:
            drive.engine.pause("r")
        for _ in range(next(waits)):
            if drive.engine.has_work():
                drive.step()
    drive.engine.resume("r")
    drive.run()
    if closes:
        close(drive, "r")
        drive.run()
    for mate, (when, length, alike) in enumerate(mates):
        if when < len(pieces):
            prompt = (LONG if alike else MATE * 2)[:length]
            assert drive.results[f"mate{mate}"].token_ids == answer(alone(), prompt, GREEDY)
    turns = turns_of(drive, "r")
    assert turns == expected(said, sampling, seed)
    assert drive.results["r"].last.finished
    assert_empty(drive)


@pytest.mark.parametrize(("prompt", "tokens"), [(33, 30), (60, 10)], ids=["as it grows", "to be admitted"])
def test_who_holds_is_preempted_first_and_recomputed_when_more_comes(prompt: int, tokens: int) -> None:
    """A holding sequence of higher rank goes before a paused and a running one of lower rank."""
    model = adapter()
    drive = driver(num_blocks=24, prefix_caching=False)  # 96 tokens
    long = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    drive.engine.add(open_request("held", sampling=GREEDY))
    append(drive, "held", LONG[:25])
    drive.run()
    drive.add(stage_request("paused", sampling=long), MATE[:20])
    drive.step()
    drive.engine.pause("paused")
    drive.add(stage_request("new", sampling=long), (MATE * 2)[:prompt])
    model.forwards.clear()
    drive.run()
    stats = drive.engine.stats()
    assert (stats["running"], stats["preemptions_total"], stats["held_blocks"]) == (1, 1, 0)
    assert (stats["waiting"], stats["holding"]) == (1, 1)  # it is not recomputed before it has something to do
    assert sum(model.forwards) == prompt + tokens - 1  # of `new`
    append(drive, "held", LONG[25:30])
    close(drive, "held")
    drive.engine.cancel("paused")
    model.forwards.clear()
    drive.run()
    assert sum(model.forwards) == 30 + len(drive.results["held"].token_ids) - 1
    assert [drive.results["held"].token_ids] == expected([LONG[:30]], GREEDY)
    assert_empty(drive)


def test_blocks_are_given_back_after_the_deadline() -> None:
    now = [100.0]
    config = AutoregressiveConfig(**SIZES, hold_seconds=5.0)
    drive = Driver(AutoregressiveEngine(adapter(), config, clock=lambda: now[0]))
    for name in ("early", "late"):
        drive.engine.add(open_request(name, sampling=GREEDY))
        append(drive, name, LONG[:21])
        drive.run()
        now[0] += 3.0
    append(drive, "late", LONG[21:25])  # begins to hold anew
    drive.run()
    assert drive.engine.stats()["holding"] == 2
    now[0] += 3.0
    drive.step()
    stats = drive.engine.stats()
    assert (stats["holds_expired_total"], stats["running"], stats["waiting"]) == (1, 1, 1)
    assert stats["held_blocks"] == 6
    assert not drive.engine.has_work()
    for name, more in (("early", LONG[21:30]), ("late", LONG[25:30])):
        append(drive, name, more, END)
    drive.run()
    [whole] = expected([LONG[:30]], GREEDY)
    assert drive.results["early"].token_ids == drive.results["late"].token_ids == whole
    assert_empty(drive)


@pytest.mark.parametrize("then", [HOLD, TURN])
def test_cancelled_while_it_holds(then: Then) -> None:
    drive = driver()
    drive.engine.add(open_request("r", sampling=GREEDY))
    append(drive, "r", LONG[:20], then)
    drive.run()
    assert drive.engine.stats()["held_blocks"] > 0
    drive.engine.cancel("r")
    assert_empty(drive)
    append(drive, "r", LONG[20:30])  # its last chunks come late
    drive.run()
    assert_empty(drive)


@pytest.mark.parametrize("emitted", range(13))
def test_continued_from_the_journal(emitted: int) -> None:
    """After any number of units a new engine gets all pieces again: it draws what is missing, and emits everything."""
    said = [LONG[:9], LONG[9:20]]
    sampling = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    first = driver()
    first.engine.add(open_request("r", seed=2, sampling=sampling, to_client=frozenset({"text"})))
    for tokens in said:
        append(first, "r", tokens, TURN)
    first.run()
    whole = first.results["r"]
    assert len(whole.token_ids) == 12
    turns = [TurnEnd(units, "length") for units in (6, 12) if units <= emitted]
    again = driver()
    resume: list[Unit] = list(whole.token_ids[:emitted])
    fields = {"resume": resume, "turns": turns, "to_client": frozenset({"text"})}
    again.engine.add(open_request("r", seed=2, sampling=sampling, **fields))
    for tokens in said:
        append(again, "r", tokens, TURN)
        if emitted % 2:
            again.run()
    again.run()
    append(again, "r", LONG[20:25])
    close(again, "r")
    again.run()
    assert again.results["r"].token_ids[:12] == whole.token_ids
    assert again.results["r"].text[:12] == whole.text
    assert again.results["r"].token_ids[12:] == answer(
        alone(), [*said[0], *whole.token_ids[:6], *said[1], *whole.token_ids[6:], *LONG[20:25]], sampling, 2, 2
    )
    assert_empty(again)


def test_closed_after_a_turn_of_an_earlier_attempt() -> None:
    again = driver()
    fields = {"resume": [7, 8], "turns": [TurnEnd(2, "stop", "x")], "to_client": frozenset({"text"})}
    again.engine.add(open_request("r", sampling=GREEDY, **fields))
    append(again, "r", LONG[:5], TURN)
    close(again, "r")
    again.run()
    last = again.results["r"].last
    assert (again.results["r"].token_ids, last.finished, last.finish_reason, last.stop_reason) == (
        [7, 8],
        True,
        "stop",
        "x",
    )
    assert_empty(again)


@pytest.mark.parametrize("preempted", [False, True])
def test_rows_of_codes_hold_too(preempted: bool) -> None:
    """Units of earlier turns keep their whole rows, also when they are computed again."""

    class OpenRows(RowAdapter):
        def feed(self, state: object, upstream: str, payload: Payload, *, final: bool) -> Fed:
            return Fed(payload["prompt"], then=payload["then"])

    model = OpenRows()
    sampling = SamplingParams(temperature=1.0, max_tokens=5)
    drive = driver(model, prefix_caching=not preempted)
    drive.engine.add(open_request("r", seed=1, sampling=sampling))
    append(drive, "r", LONG[:10], TURN)
    drive.run()
    if preempted:
        drive.engine._scheduler.restart(drive.engine._scheduler.running[0])
    append(drive, "r", LONG[10:14], END)
    drive.run()
    rows = [row for output in drive.results["r"].outputs for row in output.codes]
    told = torch.cat(
        [
            model.embed(torch.tensor(LONG[:10]), None),
            model.embed(torch.tensor(rows[:5]), None),
            model.embed(torch.tensor(LONG[10:14]), None),
        ]
    )
    ids = [*LONG[:10], *(row[0] for row in rows[:5]), *LONG[10:14]]
    alone = driver(model)
    alone.engine.add(stage_request("alone", seed=turn_seed(1, 1), sampling=sampling))
    append(alone, "alone", Prompt(ids, embeds=told), END)
    alone.run()
    assert rows[5:] == [row for output in alone.results["alone"].outputs for row in output.codes]
    assert_empty(drive)


def test_drafts_change_nothing() -> None:
    pieces = [LONG[:8] * 2, LONG[:8], LONG[3:8] * 2]
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    speculation = Speculation(NgramDrafter(1, 3), 4, adaptive=False)
    drive = Driver(AutoregressiveEngine(adapter(), AutoregressiveConfig(**SIZES), None, speculation))
    drive.engine.add(open_request("r", sampling=sampling))
    for piece in pieces:
        append(drive, "r", piece, TURN)
    drive.run()
    assert turns_of(drive, "r") == expected(pieces, sampling)
    assert drive.engine.stats()["spec_draft_tokens_total"] > 0
    close(drive, "r")
    drive.run()
    assert_empty(drive)


def test_bitwise_equal_where_the_stage_is_deterministic() -> None:
    pieces = [LONG[:21], LONG[21:25]]
    answers = expected(pieces, GREEDY)
    drive = driver(deterministic=True)
    drive.engine.add(open_request("r", sampling=GREEDY))
    for piece in pieces:
        append(drive, "r", piece, TURN)
    drive.run()
    assert turns_of(drive, "r") == answers


def refused(sampling: SamplingParams, then: Then, **config: object) -> TokenOutput:
    drive = driver(**config)
    drive.engine.add(open_request("r", sampling=sampling, to_client=frozenset({"text"})))
    append(drive, "r", LONG[:20], then)
    drive.run()
    assert_empty(drive)
    return drive.results["r"].last


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(n=2), "n"),
        (SamplingParams(best_of=3), "best_of"),
        (SamplingParams(beam_width=2), "beam_width"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
    ],
)
def test_refused_by_name(sampling: SamplingParams, field: str) -> None:
    error = refused(sampling, HOLD).error
    assert isinstance(error, InvalidRequest)
    assert error.field == f"sampling.main.{field}"
    assert f"sampling.main.{field} is" in error.message
    assert "open" in error.message


def test_more_than_the_stage_can_hold() -> None:
    drive = driver(num_blocks=8)  # 32 tokens
    drive.engine.add(open_request("r", sampling=GREEDY))
    append(drive, "r", LONG[:20])
    drive.run()
    append(drive, "r", LONG[20:32])
    drive.run()
    error = drive.results["r"].last.error
    assert isinstance(error, TooLong)
    assert error.field == "append"
    assert "32 tokens" in error.message
    assert_empty(drive)


def test_nothing_follows_the_last_piece() -> None:
    drive = driver()
    drive.engine.add(open_request("r", sampling=GREEDY))
    append(drive, "r", LONG[:20], END)
    append(drive, "r", LONG[20:22])
    drive.run()
    assert isinstance(drive.results["r"].last.error, StageFailed)
    drive.engine.add(open_request("empty", sampling=GREEDY))
    close(drive, "empty")
    drive.run()
    error = drive.results["empty"].last.error
    assert isinstance(error, InvalidRequest)
    assert error.field == "append"
    assert_empty(drive)


def test_positions_of_a_piece_count_from_the_end_of_what_was_before() -> None:
    parts = Pieces(3)
    own = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2]])
    parts.add(Prompt([1, 2, 3, 4], positions=own, position_delta=-1), 0)  # 3 positions for 4 tokens
    parts.add(Prompt([5, 6]), 6)  # after 2 units, at positions 3 and 4
    parts.add(Prompt([7, 8], positions=own[:, :2]), 9)
    assert parts.positions(0, 12)[2].tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert parts.positions(3, 7)[0].tolist() == [2, 3, 4, 5]
    assert parts.positions(9, 11).tolist() == [[8, 9]] * 3
    text, ids = Pieces(3), [1, 2, 3, 4, 0, 0, 5, 6]
    text.add(Prompt(ids), 0)
    same = [parts.identity(start, start + 2, ids) == text.identity(start, start + 2, ids) for start in (0, 2, 6)]
    assert same == [True, False, False]


def test_pieces_are_found_as_a_whole_in_the_prefix_cache() -> None:
    model = adapter()
    drive = driver()
    drive.add(stage_request("before", sampling=GREEDY), LONG[:40])
    drive.run()
    model.forwards.clear()
    drive.engine.add(open_request("r", sampling=GREEDY))
    for begin in (0, 11, 27):
        append(drive, "r", LONG[begin : {0: 11, 11: 27, 27: 40}[begin]])
    close(drive, "r")
    drive.run()
    assert drive.results["r"].token_ids == drive.results["before"].token_ids
    assert drive.engine.stats()["prefix_hit_tokens_total"] == 36
    assert sum(model.forwards) == 40 - 36 + len(drive.results["r"].token_ids) - 1
