"""The scheduler with forks and beam groups, without a model: copies are planned where blocks are shared, beam groups
stay together, and the state is consistent whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from ar_scheduling import SIZE, advance, make, new_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.schedule.decision import Decision, ScheduledSequence
from segue.engines.autoregressive.schedule.scheduler import Scheduler


def fork(scheduler: Scheduler, parent: ScheduledSequence, count: int, *, beam_group: bool) -> list[ScheduledSequence]:
    """`count` children of a running sequence that has computed all but the token it has just got."""
    children = []
    for number in range(1, count + 1):
        priority, arrival, serial = parent.rank
        child = ScheduledSequence(
            f"{parent.key}.{number}", (priority, arrival, serial + number), parent.length, parent.length
        )
        child.hashes = parent.hashes[:]
        scheduler.fork(parent, child)
        children.append(child)
    if beam_group:
        for child in children:
            child.beam_group = children
    scheduler.audit()
    return children


def runs(decision: Decision) -> dict[str, tuple[int, bool]]:
    return {run.sequence.key: (run.tokens, run.copy) for run in decision.runs}


def prefilled(scheduler: Scheduler, length: int) -> ScheduledSequence:
    parent = new_sequence("p", length)
    scheduler.add(parent)
    advance(scheduler)
    return parent


def test_all_but_one_copy_the_block_they_share():
    scheduler = make(20)
    parent = prefilled(scheduler, SIZE + 1)
    fork(scheduler, parent, 3, beam_group=False)
    assert scheduler.pool.used == 2
    decision = scheduler.next()
    assert runs(decision) == {"p": (1, True), "p.1": (1, True), "p.2": (1, True), "p.3": (1, False)}
    shared = parent.blocks[1]
    copies = scheduler.apply(decision)
    scheduler.audit()
    assert [source for source, _ in copies] == [shared] * 3
    assert len({target for _, target in copies}) == 3
    assert scheduler.pool.used == 1 + 4


def test_nothing_is_copied_where_the_prompt_fills_its_blocks():
    scheduler = make(20)
    fork(scheduler, prefilled(scheduler, SIZE), 2, beam_group=False)
    assert runs(scheduler.next()) == {"p": (1, False), "p.1": (1, False), "p.2": (1, False)}


def test_without_room_for_copies_the_last_forks_give_way():
    scheduler = make(3, max_batch=8)
    fork(scheduler, prefilled(scheduler, SIZE + 1), 3, beam_group=False)
    decision = advance(scheduler)
    assert [victim.key for victim in decision.preempt] == ["p.3", "p.2"]
    assert runs(decision) == {"p": (1, True), "p.1": (1, False)}


def test_a_beam_group_runs_whole_or_not_at_all():
    scheduler = make(40, max_batch=5)
    parent = prefilled(scheduler, SIZE + 1)
    beam_group = fork(scheduler, parent, 3, beam_group=True)
    scheduler.remove(parent)
    for serial, key in enumerate(("first", "second")):
        scheduler.add(new_sequence(key, 3, priority=-1, serial=serial))
    assert set(runs(advance(scheduler))) == {"p.1", "p.2", "p.3", "first", "second"}
    scheduler.limits = make(1, max_batch=4).limits
    assert set(runs(advance(scheduler))) == {"first", "second"}, "two places are left, and three are wanted"
    assert all(one.running for one in beam_group)
    scheduler.remove(scheduler.running[0])
    assert set(runs(advance(scheduler))) == {"p.1", "p.2", "p.3", "second"}


def test_a_beam_group_is_preempted_whole():
    scheduler = make(5, max_batch=8)
    parent = prefilled(scheduler, SIZE + 1)
    beam_group = fork(scheduler, parent, 3, beam_group=True)
    scheduler.remove(parent)
    advance(scheduler)
    scheduler.add(new_sequence("urgent", SIZE, priority=-1))
    advance(scheduler)
    decision = advance(scheduler)
    assert {victim.key for victim in decision.preempt} == {one.key for one in beam_group}
    assert scheduler.preemptions == 3


def test_room_is_kept_for_what_a_prompt_will_be_forked_into():
    scheduler = make(100, max_batch=4)
    wide, narrow = new_sequence("wide", 3, arrival=1), new_sequence("narrow", 3, arrival=2)
    wide.width = 3
    for one in (new_sequence("first", 3), wide, narrow):
        scheduler.add(one)
    assert set(runs(advance(scheduler))) == {"first", "wide"}


@dataclass
class Family:
    """A request of the simulation: a prompt, forked when it is computed."""

    prompt: int
    count: int
    beam_group: bool
    root: ScheduledSequence
    total: int
    live: list[ScheduledSequence] = field(default_factory=list)
    forked: bool = False


families = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.integers(1, 14),
            "count": st.integers(1, 4),
            "beams": st.booleans(),
            "output": st.integers(1, 9),
            "priority": st.integers(0, 2),
            "start": st.integers(0, 8),
            "cancel": st.sampled_from([None, None, 3, 8]),
            "parents": st.lists(st.integers(0, 3), min_size=4, max_size=4),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(families, st.integers(24, 40), st.integers(4, 8), st.integers(4, 24), st.sampled_from([(None,), (None, 5)]))
def test_blocks_are_conserved(wanted, num_blocks, max_batch, max_tokens, windows):
    scheduler = make(num_blocks * len(windows), max_batch=max_batch, max_tokens=max_tokens, windows=windows)
    alive: dict[int, Family] = {}
    for step in range(600):
        for place, request in enumerate(wanted):
            if request["start"] == step:
                root = new_sequence(
                    f"r{place}", request["prompt"], priority=request["priority"], arrival=step, serial=10 * place
                )
                root.width = request["count"]
                total = request["prompt"] + request["output"]
                alive[place] = Family(request["prompt"], request["count"], request["beams"], root, total, [root])
                scheduler.add(root)
            if request["cancel"] is not None and step == request["start"] + request["cancel"]:
                family = alive.pop(place, None)
                for one in family.live if family else []:
                    scheduler.remove(one)
        decision = scheduler.next()
        assert decision == scheduler.next(), "schedule changed something"
        together(decision)
        assert sum(run.tokens for run in decision.runs) <= max_tokens
        assert len(decision.runs) <= max_batch
        held = {run.sequence.key: list(run.sequence.blocks) for run in decision.runs}
        copies = scheduler.apply(decision)
        written(scheduler, decision)
        assert all(any(source in blocks for blocks in held.values()) for source, _ in copies)
        for run in decision.runs:
            scheduler.advance(run.sequence, run.stop, publish=False)
        for place in list(alive):
            grow(scheduler, alive[place], wanted[place]["parents"], {id(one) for one in decision.preempt})
            if not alive[place].live:
                del alive[place]
        scheduler.audit()
        if not alive and step > 12:
            break
    assert not alive, "starved"
    assert scheduler.pool.used == 0


def together(decision: Decision) -> None:
    """Beam groups whose last tokens are ready run whole; all of a beam group is preempted."""
    ran, gone = {id(run.sequence) for run in decision.runs}, {id(one) for one in decision.preempt}
    for run in decision.runs:
        assert {id(one) for one in run.sequence.unit} <= ran
    for one in decision.preempt:
        assert {id(other) for other in one.beam_group} <= gone


def written(scheduler: Scheduler, decision: Decision) -> None:
    """After the copies, every block that is written to in this step has one holder."""
    for run in decision.runs:
        for table in run.sequence.tables:
            for index in range(run.start // SIZE, -(-run.stop // SIZE)):
                assert scheduler.pool.references[table.blocks[index - table.first]] == 1


def grow(scheduler: Scheduler, family: Family, parents: list[int], preempted: set[int]) -> None:
    """What the engine does after a step: fork, take tokens, let beams replace each other, end, put beam groups
    aside."""
    if family.beam_group and any(id(one) in preempted for one in family.live) and family.forked:
        for one in family.live:
            scheduler.remove(one)
        family.root.length = family.root.ready = family.prompt
        family.forked, family.live = False, [family.root]
        scheduler.add(family.root)
        return
    if not family.forked:
        if family.root.computed == family.prompt:
            family.forked, family.root.width = True, 1
            children = fork(scheduler, family.root, family.count, beam_group=family.beam_group)
            scheduler.remove(family.root)
            family.live = children
            for one in children:
                one.length = one.ready = family.prompt + 1
        return
    if family.beam_group and all(one.computed == one.length for one in family.live):
        for one, parent in zip(family.live, parents, strict=False):
            other = family.live[parent % len(family.live)]
            if other is not one:
                scheduler.replace(one, other)
    for one in list(family.live):
        if one.computed == one.length:
            one.length = one.ready = one.length + 1
        if one.length > family.total:
            scheduler.remove(one)
            family.live.remove(one)
            for other in family.live:
                other.beam_group = [x for x in other.beam_group if x is not one]
