"""States of prefixes, without a model: whoever goes on from one finds that of its own tokens, and none is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.blocks import ROOT, BlockPool, block_hash
from segue.engines.autoregressive.cache.states import Snapshots, StateSlots, places
from segue.engines.autoregressive.schedule.decision import Decision, Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.scheduler import Scheduler

SIZE = 4


@dataclass
class Model:
    """A stage whose state after some tokens is these tokens, so that a wrong one is seen."""

    scheduler: Scheduler
    texts: dict[ScheduledSequence, str] = field(default_factory=dict)
    """Known tokens of each sequence."""
    memory: dict[int, str] = field(default_factory=dict)
    """By slot."""
    computed: int = 0
    """Tokens, all in all."""

    def add(self, key: str, text: str, serial: int) -> ScheduledSequence:
        sequence = ScheduledSequence(key, (0, 0.0, serial))
        self.texts[sequence] = ""
        self._append(sequence, text)
        self.scheduler.add(sequence)
        return sequence

    def launch(self) -> Decision:
        scheduler = self.scheduler
        decision = scheduler.next()
        assert decision == scheduler.next(), "deciding changed something"
        scheduler.apply(decision)
        assert scheduler.slots is not None
        before = dict(self.memory)
        for source, target in scheduler.slots.take_copies():
            self.memory[target] = before[source]
        for run in decision.runs:
            text, slot = self.texts[run.sequence] + "d" * run.drafts, run.sequence.slot
            assert slot is not None
            assert run.start == 0 or self.memory[slot] == text[: run.start], "it goes on from another's state"
            self.memory[slot] = text[: run.stop]
            for place in run.keep:
                if place in run.sequence.held:
                    self.memory[run.sequence.held[place]] = text[:place]
            self.computed += run.tokens
        scheduler.dispatched(decision.runs)
        return decision

    def land(self, decision: Decision, *, broken: bool = False, letter: str = "a", accepted: int = 0) -> None:
        """`accepted`: of the drafts of each, where it has so many."""
        self.scheduler.completed(decision.runs)
        for run in decision.runs:
            if run.sequence in self.texts:
                computed = run.stop
                if run.stop - run.drafts == run.sequence.length:
                    self._append(run.sequence, "d" * min(accepted, run.drafts) + letter)
                    computed = run.sequence.length - 1
                run.sequence.drafts = 0
                self.scheduler.advance(run.sequence, computed, publish=not broken)
        self.scheduler.settle()
        self.scheduler.audit()

    def step(self) -> Decision:
        decision = self.launch()
        self.land(decision)
        return decision

    def remove(self, sequence: ScheduledSequence) -> None:
        del self.texts[sequence]
        self.scheduler.remove(sequence)

    def _append(self, sequence: ScheduledSequence, text: str) -> None:
        self.texts[sequence] += text
        sequence.length = sequence.ready = len(self.texts[sequence])
        while (len(sequence.hashes) + 1) * SIZE <= sequence.length:
            start = len(sequence.hashes) * SIZE
            parent = sequence.hashes[-1] if sequence.hashes else ROOT
            sequence.hashes.append(block_hash(parent, self.texts[sequence][start : start + SIZE].encode()))


def make(
    num_blocks: int = 100, *, sequences: int = 4, kept: int = 4, max_tokens: int = 100, windows=(None,), drafts=False
) -> tuple[Model, Snapshots]:
    slots = StateSlots(sequences)
    snapshots = Snapshots(slots.total, kept + drafts * sequences)
    limits = Limits(SIZE, sequences, max_tokens, windows)
    return Model(Scheduler(BlockPool(num_blocks), limits, None, slots, snapshots)), snapshots


def starts(decision: Decision) -> dict[str, int]:
    return {run.sequence.key: run.start for run in decision.runs}


prompts = st.lists(st.sampled_from(["aaaa", "bbbb", "ab", "a"]), min_size=1, max_size=6).map("".join)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), prompts),
            st.tuples(st.sampled_from(["remove", "pause"]), st.integers(0, 9)),
            st.tuples(st.sampled_from(["step", "step", "broken", "in flight"]), st.sampled_from("ab")),
            st.tuples(st.just("draft"), st.integers(0, 3)),
        ),
        max_size=40,
    ),
    st.integers(0, 30),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([(None,), (1,), (None, 5)]),  # with attention, without, and with layers that have a window
)
def test_whoever_goes_on_finds_its_own_tokens(actions, spare, sequences, kept, max_tokens, windows):
    need = Limits(SIZE, sequences, max_tokens, windows).need(64)
    sizes = {"sequences": sequences, "kept": kept, "max_tokens": max_tokens, "windows": windows}
    model, snapshots = make(need + spare, **sizes, drafts=True)
    for serial, (action, given_) in enumerate(actions):
        live = list(model.texts)
        match action:
            case "add":
                model.add(f"r{serial}", given_, serial)
            case "remove" if live:
                model.remove(live[given_ % len(live)])
            case "pause" if live:
                sequence = live[given_ % len(live)]
                sequence.paused = not sequence.paused
            case "step" | "broken":
                model.land(model.launch(), broken=action == "broken", letter=given_)
            case "draft":
                for sequence in live:
                    sequence.drafts = 3 * (sequence.running and sequence.computed == sequence.length - 1)
                model.land(model.launch(), accepted=given_)
            case "in flight":
                decision = model.launch()
                for run in decision.runs[:1]:
                    model.remove(run.sequence)
                model.land(decision, letter=given_)
            case _:
                pass
        model.scheduler.settle()
        model.scheduler.audit()
        assert snapshots.kept <= snapshots.total
        for sequence in [sequence for sequence, text in model.texts.items() if len(text) >= 50]:
            model.remove(sequence)
    for sequence in list(model.texts):
        model.remove(sequence)
    model.scheduler.audit()


@pytest.mark.parametrize("windows", [(None,), (1,)])
def test_an_equal_prompt_and_a_longer_one_go_on(windows):
    model, _ = make(windows=windows)
    model.add("first", "x" * 16, 0)
    assert starts(model.step()) == {"first": 0}
    model.add("equal", "x" * 16, 1)
    model.add("longer", "x" * 16 + "y", 2)
    assert starts(model.step()) == {"first": 16, "equal": 12, "longer": 16}
    assert model.scheduler.hit_tokens == 28


def test_equal_prompts_that_come_together_are_computed_once():
    model, _ = make()
    for serial in range(4):
        model.add(f"r{serial}", "x" * 18, serial)
    assert starts(model.step()) == {"r0": 0}
    assert starts(model.step()) == {"r0": 18, "r1": 16, "r2": 16, "r3": 16}


def test_a_common_beginning_is_computed_once():
    """It ends within the first prompt: that one keeps its state there for those who wait."""
    model, _ = make()
    for serial in range(4):
        model.add(f"r{serial}", "x" * 13 + str(serial) * 9, serial)
    assert starts(model.step()) == {"r0": 0}
    assert starts(model.step()) == {"r0": 22, "r1": 12, "r2": 12, "r3": 12}


def test_a_beginning_that_is_met_again_is_kept():
    """What one has left behind ends after the beginning that others share: the second computes it, the third does
    not."""
    model, _ = make()
    for serial, start in enumerate([0, 0, 12, 12]):
        sequence = model.add(f"r{serial}", "x" * 13 + str(serial) * 9, serial)
        assert starts(model.step()) == {f"r{serial}": start}
        model.remove(sequence)


def test_a_reply_is_gone_on_from():
    """What is kept while a sequence generates is its last border only."""
    model, snapshots = make()
    sequence = model.add("first", "x" * 6, 0)
    while len(model.texts[sequence]) < 16:
        model.step()
    assert snapshots.kept == 2  # the prompt's last border, and that after 12 tokens
    text = model.texts[sequence]
    model.remove(sequence)
    model.add("next", text + "y" * 5, 1)
    assert starts(model.step()) == {"next": 12}


def test_after_a_preemption_it_goes_on():
    """From the last border of which keys and values are there, too: the block after it went to another."""
    model, snapshots = make(6, sequences=2, max_tokens=24)
    high = model.add("high", "x" * 5, 0)
    low = model.add("low", "y" * 14, 1)
    for _ in range(5):
        model.step()
    assert not low.running
    assert snapshots.has(low.hashes[3])
    model.remove(high)
    assert starts(model.step()) == {"low": 12}
    assert model.scheduler.preemptions == 1


@pytest.mark.parametrize(("accepted", "start", "kept"), [(0, 7, 2), (1, 7, 2), (3, 10, 1)])
def test_behind_a_rejected_draft_it_goes_on_from_before_them(accepted, start, kept):
    model, snapshots = make(drafts=True)
    sequence = model.add("one", "x" * 6, 0)
    model.step()
    sequence.drafts = 3
    decision = model.launch()
    assert [(run.start, run.stop, run.keep) for run in decision.runs] == [(6, 10, (7,))]
    model.land(decision, accepted=accepted)
    assert len(model.texts[sequence]) == 7 + accepted + 1
    assert starts(model.step()) == {"one": start}
    assert snapshots.kept == kept


def test_what_restarts_gives_all_back():
    model, snapshots = make(drafts=True)
    sequence = model.add("one", "x" * 6, 0)
    model.step()
    sequence.drafts = 3
    decision = model.launch()
    model.scheduler.completed(decision.runs)
    model.scheduler.restart(sequence)
    sequence.drafts = 0
    model.scheduler.audit()
    assert (model.scheduler.pool.used, snapshots.kept) == (0, 1)
    assert starts(model.step()) == {"one": 4}


def test_the_least_recently_used_goes_first():
    snapshots = Snapshots(10, 2)
    for key in (b"one", b"two"):
        slot = snapshots.reserve()
        assert slot is not None
        assert snapshots.publish(key, slot)
    snapshots.use(b"one")
    held = snapshots.reserve()
    assert (snapshots.has(b"one"), snapshots.has(b"two")) == (True, False)
    other = snapshots.reserve()
    assert snapshots.reserve() is None, "all are held"
    assert held is not None
    assert other is not None
    snapshots.audit([held, other])
    assert not snapshots.has(b"one")
    assert snapshots.publish(b"two", held)
    assert not snapshots.publish(b"two", other), "one state of a prefix is enough"
    snapshots.audit([])
    with pytest.raises(AssertionError, match="given back twice"):
        snapshots.give(other)


def test_a_long_prompt_leaves_others_their_states():
    """Those behind its chunks are kept where there is room, and go first."""
    model, snapshots = make(max_tokens=8, kept=3)
    short = model.add("short", "x" * 6, 1)
    model.step()
    model.remove(short)
    long = model.add("long", "y" * 46, 2)
    while long.computed < 46:
        model.step()
    assert snapshots.kept == 3
    assert snapshots.has(short.hashes[0])
    assert snapshots.has(long.hashes[10])
    model.remove(long)
    model.add("again", "x" * 6, 3)
    assert starts(model.step()) == {"again": 4}


def test_where_states_are_kept():
    sequence = ScheduledSequence("r", (0, 0.0, 0), length=22, hashes=[b""] * 5)
    assert places(sequence, 0, 10, 0, SIZE) == (8,)  # a chunk
    assert places(sequence, 8, 10, 0, SIZE) == ()
    assert places(sequence, 10, 22, 0, SIZE) == (20,)
    assert places(sequence, 10, 22, 16, SIZE) == (16, 20)
    assert places(sequence, 21, 22, 16, SIZE) == ()
    sequence.length = 20
    assert places(sequence, 0, 20, 0, SIZE) == (16, 20)  # for an equal prompt, and for a longer one
    sequence.beam_group = [sequence]
    assert places(sequence, 0, 20, 0, SIZE) == ()
