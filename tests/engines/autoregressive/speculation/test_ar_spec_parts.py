"""Acceptance, prompt lookup, and when speculation pays, each by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue.engines.autoregressive.sample.sampler import RowSampler
from segue.engines.autoregressive.speculation.drafter import Wanted, accepted
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.worth import Costs, Gate
from segue.messages.sampling import SamplingParams

ANY_DRAW = RowSampler.of(SamplingParams(), 0, [], 10, ())


def test_accepted_are_those_before_the_first_difference():
    assert accepted([], [7]) == 0
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accepted([1, 2, 3], [1, 9, 3, 4]) == 1
    assert accepted([1, 2, 3], [9, 2, 3, 4]) == 0


# --- prompt lookup ---------------------------------------------------------------------------------------------------


def look_up(drafter: NgramDrafter, ids: list[int], most: int = 3, key: str = "it") -> list[int]:
    return drafter.propose([Wanted(key, ids, most, 0, ANY_DRAW)])[0]


def test_what_followed_the_longest_ending_is_proposed():
    drafter = NgramDrafter(1, 3)
    assert look_up(drafter, [1, 2, 3, 4, 9, 2, 3, 8, 1, 2, 3]) == [4, 9, 2]  # 1 2 3, not the later 2 3
    assert look_up(NgramDrafter(1, 2), [1, 2, 3, 4, 9, 2, 3, 8, 1, 2, 3]) == [8, 1, 2]  # the latest 2 3
    assert look_up(NgramDrafter(2, 3), [1, 2, 3, 4, 5]) == []
    assert look_up(NgramDrafter(2, 3), [1]) == []


def test_a_loop_is_continued():
    assert look_up(NgramDrafter(2, 4), [5, 1, 2, 3, 1, 2, 3, 1, 2], most=7) == [3, 1, 2, 3, 1, 2, 3]
    assert look_up(NgramDrafter(1, 4), [6, 6], most=4) == [6, 6, 6, 6]


def test_sequences_do_not_see_each_other_and_are_forgotten():
    drafter = NgramDrafter(1, 2)
    assert look_up(drafter, [1, 2, 1], key="a") == [2, 1, 2]
    assert look_up(drafter, [1], key="b") == []
    drafter.forget("a")
    assert look_up(drafter, [3, 4, 3], key="a") == [4, 3, 4]
    drafter.forget("never heard of")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3), st.data())
def test_the_index_grown_by_pieces_gives_what_a_search_gives(ids, least, more, data):
    drafter, sizes = NgramDrafter(least, least + more), range(least + more, least - 1, -1)
    place = 0
    while place < len(ids):
        place = data.draw(st.integers(place + 1, len(ids)))
        known = ids[:place]
        found = next(
            (
                end
                for size in sizes
                for end in range(place - 1, size - 1, -1)
                if known[end - size : end] == known[place - size :]
            ),
            None,
        )
        expected = list(known)
        if found is not None:
            for step in range(5):
                expected.append(expected[found + step])
        assert look_up(drafter, known, most=5) == expected[place:]


# --- does it pay? ----------------------------------------------------------------------------------------------------


def costs(*, fixed: float, per_row: float, draft: float = 0.0) -> Costs:
    measured = Costs()
    for rows in (1, 5, 4, 8, 2, 16, 3) * 3:
        measured.step(rows, fixed + per_row * rows)
        measured.drafting(1, draft)
    return measured


def test_break_even_is_the_time_of_drafts_over_the_time_of_a_token():
    assert Costs().break_even(1, 4) == 0.0
    idle = costs(fixed=1.0, per_row=0.01)
    assert abs(idle.break_even(1, 4) - 0.04 / 1.01) < 1e-6
    assert abs(idle.break_even(8, 4) - 8 * 0.04 / 1.08) < 1e-6
    full = costs(fixed=0.0, per_row=0.1)
    assert abs(full.break_even(3, 4) - 4) < 1e-6, "all drafts must be accepted to be worth as much as other rows"
    drafting = costs(fixed=1.0, per_row=0.0, draft=0.5)
    assert abs(drafting.break_even(1, 4) - 0.5) < 1e-6


def test_steps_of_one_width_only_say_nothing_against_drafts():
    measured = Costs()
    for _ in range(20):
        measured.step(4, 0.1)
    assert measured.break_even(4, 4) == 0.0


def verdicts(gate: Gate, accepted_drafts: int, measured: Costs, steps: int) -> list[bool]:
    opened = []
    for _ in range(steps):
        opened.append(gate.open)
        if gate.open:
            gate.verified(4, accepted_drafts, measured, 1)
        else:
            gate.rested(1)
    return opened


def test_a_gate_closes_where_drafts_cost_more_than_they_give_and_tries_again():
    measured = costs(fixed=1.0, per_row=0.3)  # 4 drafts cost 1.2 / 1.3 of a token's time
    gate = Gate()
    assert all(verdicts(gate, 1, measured, 100))
    opened = verdicts(Gate(), 0, measured, 200)
    assert opened[:8] == [True] * 8
    assert opened[8:40] == [False] * 32
    assert opened[40:48] == [True] * 8
    assert opened[48:112] == [False] * 64, "rests grow while it does not pay"
    assert opened[112] is True


def test_rests_are_short_again_after_good_times():
    measured = costs(fixed=1.0, per_row=0.3)
    gate = Gate()
    verdicts(gate, 0, measured, 8 + 32 + 8 + 64)
    verdicts(gate, 3, measured, 8)
    opened = verdicts(gate, 0, measured, 60)
    closed = opened.index(False)
    assert opened[closed : closed + 33] == [False] * 32 + [True]
