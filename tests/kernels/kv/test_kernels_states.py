"""A step over states: runs that are cut where a state is kept give the same, and the state there is that of the cut."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from segue.kernels.kv.state_cache import Mixer, StepCache
from segue.kernels.kv.states import StateKey, StateLayout, StateStore, StateTensor, Stretch, state_step

WIDTH = 3
LAYOUT = StateLayout((StateTensor(StateKey(0, "recurrent"), (WIDTH,), torch.float64),), continues=True)


class Decay(nn.Module):
    """h ← h / 2 + x, changed in place where there is a state."""

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        """[sequences, tokens, width]"""
        state = cache.get_recurrent_state(0)
        if state is None:
            state = cache.update_recurrent_state(x.new_zeros(len(x), WIDTH), 0)
        rows = []
        for row in x.unbind(1):
            state.mul_(0.5).add_(row)
            rows.append(state.clone())
        return torch.stack(rows, dim=1)


class Scan(nn.Module):
    """The same as transformers' selective scans have it: in place for one token, from zeros for several."""

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        """[sequences, tokens, width]"""
        other = torch.zeros(len(x), WIDTH + 1, dtype=x.dtype)
        state = cache.get_recurrent_state(0)
        if state is not None and x.shape[1] == 1:
            return state.mul_(0.5).add_(x[:, 0])[:, None] + other[:, None, :-1]
        state, rows = torch.zeros(len(x), WIDTH, dtype=x.dtype), []
        for row in x.unbind(1):
            state = state / 2 + row
            rows.append(state)
        cache.update_recurrent_state(state, 0)
        return torch.stack(rows, dim=1) + torch.zeros(len(x), WIDTH, dtype=x.dtype)[:, None]


def whole(x: torch.Tensor) -> torch.Tensor:
    """[tokens, width] of one sequence, from its start."""
    out, state = [], torch.zeros(WIDTH, dtype=x.dtype)
    for row in x:
        state = state / 2 + row
        out.append(state)
    return torch.stack(out)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_cut_or_whole(sequences: list[tuple[list[int], int, bool]], random: Any, scans: bool) -> None:
    """By sequence: tokens of its steps, cuts of each, whether states are kept at the cuts."""
    order = list(range(len(sequences)))
    random.shuffle(order)  # of slots
    store = StateStore(LAYOUT, 64, torch.device("cpu"))
    mixer, free = Mixer(Scan(), begun=True) if scans else Mixer(Decay()), len(sequences)
    texts = [torch.randn(sum(steps), WIDTH, dtype=torch.float64) for steps, _, _ in sequences]
    done = [0] * len(sequences)
    for step in range(max(len(steps) for steps, _, _ in sequences)):
        stretches, rows, ranges, kept = [], [], [], []
        for number, (steps, cuts, keeps) in enumerate(sequences):
            if step >= len(steps):
                continue
            start, stop = done[number], done[number] + steps[step]
            borders = sorted({*(random.randint(start + 1, stop) for _ in range(cuts)), stop})
            for border in borders:
                keep = None
                if keeps and free < 64:
                    keep, free = free, free + 1
                    kept.append((keep, number, border))
                stretches.append(Stretch(order[number], start, border, keep))
                start = border
            rows.append(texts[number][done[number] : stop])
            ranges.append((number, done[number], stop))
            done[number] = stop
        out = mixer(torch.cat(rows)[None], StepCache(state_step(store, stretches)))[0]
        for (number, start, stop), part in zip(
            ranges, out.split([stop - start for _, start, stop in ranges]), strict=True
        ):
            torch.testing.assert_close(part, whole(texts[number])[start:stop])
        for slot, number, border in kept:
            held = store.read(StateKey(0, "recurrent"), torch.tensor([slot]))[0]
            torch.testing.assert_close(held, whole(texts[number])[border - 1])


def test_a_scan_forgets_by_itself() -> None:
    text = torch.randn(6, WIDTH, dtype=torch.float64)
    for begun in (False, True):
        store = StateStore(LAYOUT, 1, torch.device("cpu"))
        mixer = Mixer(Scan(), begun=begun)
        halves = [
            mixer(text[None, start : start + 3], StepCache(state_step(store, [Stretch(0, start, start + 3)])))[0]
            for start in (0, 3)
        ]
        assert torch.allclose(torch.cat(halves), whole(text)) == begun


def test_what_is_alike_shares_a_call() -> None:
    store = StateStore(LAYOUT, 8, torch.device("cpu"))
    first = [Stretch(3, 7, 8), Stretch(1, 4, 5, 6), Stretch(2, 0, 4), Stretch(2, 4, 6)]
    step = state_step(store, [*first, Stretch(4, 0, 4), Stretch(4, 4, 6)])
    groups = step.groups
    assert step.tokens == 14
    assert [(group.begin, group.end, group.slots.tolist(), group.fresh) for group in groups] == [
        (0, 2, [3, 1], False),
        (2, 10, [2, 4], True),
        (6, 10, [2, 4], False),
    ]
    rows = [group.rows if group.rows is None else group.rows.tolist() for group in groups]
    assert rows == [None, [2, 3, 4, 5, 8, 9, 10, 11], [6, 7, 12, 13]]
    kept = [group.kept and [part.tolist() for part in group.kept] for group in groups]
    assert kept == [[[1], [6]], None, None]
