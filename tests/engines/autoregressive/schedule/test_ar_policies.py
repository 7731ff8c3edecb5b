"""Who is admitted first: by arrival, by priority, in fair shares. Decisions only; no model."""

from __future__ import annotations

from collections import Counter

import pytest
from ar_adapter import Driver, TinyAdapter, prompts, stage_request, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.schedule.decision import Decision, Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.policies import OUTPUT_WEIGHT, PROMPT_WEIGHT, Accounts, rank
from segue.engines.autoregressive.schedule.scheduler import Scheduler
from segue.messages.errors import ConfigError
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams

SIZE = 4


class Sim:
    """Requests with known output lengths, run to their ends under a policy."""

    def __init__(self, scheduling: str, num_blocks: int, max_batch: int = 4, max_tokens: int = 16) -> None:
        self.scheduling = scheduling
        accounts = Accounts() if scheduling == "fair" else None
        self.scheduler = Scheduler(BlockPool(num_blocks), Limits(SIZE, max_batch, max_tokens), accounts)
        self.totals: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.service: Counter[str] = Counter()
        """By tenant: what it got, counted here and not by the accounts."""
        self.seen: dict[str, int] = {}
        self.serial = 0

    def add(
        self, prompt: int, output: int, *, priority: int = 0, tenant: str = "", share: float = 1
    ) -> ScheduledSequence:
        key = f"{tenant}{self.serial}"
        order = rank(self.scheduling, priority, self.serial, self.serial)
        sequence = ScheduledSequence(key, order, prompt, prompt, tenant=tenant, share=share)
        self.serial += 1
        self.totals[key], self.prompts[key] = prompt + output, prompt
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Decision:
        scheduler = self.scheduler
        decision = scheduler.next()
        assert decision == scheduler.next(), "schedule changed something"
        assert sum(run.tokens for run in decision.runs) <= scheduler.limits.max_tokens
        assert len(decision.runs) <= scheduler.limits.max_batch
        scheduler.apply(decision)
        for run in decision.runs:
            sequence = run.sequence
            if sequence.key not in self.seen:
                self.seen[sequence.key] = self.prompts[sequence.key]
                self.service[sequence.tenant] += PROMPT_WEIGHT * self.prompts[sequence.key]
            scheduler.advance(sequence, run.stop, publish=False)
            if run.stop == sequence.length:
                sequence.length = sequence.ready = sequence.length + 1
                self.service[sequence.tenant] += OUTPUT_WEIGHT
                if sequence.length == self.totals[sequence.key]:
                    scheduler.remove(sequence)
        scheduler.audit()
        return decision

    def waiting(self, tenant: str) -> int:
        return sum(sequence.tenant == tenant for sequence in self.scheduler.waiting)


sizes = st.tuples(st.integers(1, 20), st.integers(1, 12))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(sizes, min_size=1, max_size=5),
    st.lists(sizes, min_size=1, max_size=5),
    st.lists(sizes, max_size=3),
    st.integers(8, 30),
    st.integers(1, 6),
    st.integers(4, 40),
)
def test_the_bound_on_the_difference_of_service(first, second, third, num_blocks, max_batch, max_tokens):
    """Sheng et al., Theorem 4.4, for two tenants that always have something waiting, whatever a third one does."""
    sim = Sim("fair", num_blocks, max_batch, max_tokens)
    longest = max(prompt for prompt, _ in first + second)
    bound = 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * num_blocks * SIZE)
    differences = []
    for step in range(150):
        for tenant, shapes in (("f", first), ("g", second)):
            while sim.waiting(tenant) <= max_batch:  # so many are left waiting that one step cannot admit them all
                sim.add(*shapes[sim.serial % len(shapes)], tenant=tenant)
        if third and step % 40 < 10:
            sim.add(*third[step % len(third)], tenant="h")
        sim.step()
        differences.append(sim.service["f"] - sim.service["g"])
    assert max(differences) - min(differences) <= bound


def test_first_come_first_served_breaks_the_bound():
    """A tenant that asks ten times as much gets ten times as much: the bound is not kept by accident."""
    served = {}
    for scheduling in ("fcfs", "fair"):
        sim = Sim(scheduling, num_blocks=20)
        for _ in range(400):
            while sim.waiting("quiet") < 1:
                for _ in range(10):
                    sim.add(8, 8, tenant="loud")
                sim.add(8, 8, tenant="quiet")
            sim.step()
        served[scheduling] = sim.service["loud"] / sim.service["quiet"]
    assert served["fcfs"] > 5
    assert 0.8 < served["fair"] < 1.25


def test_service_is_in_proportion_to_shares():
    sim = Sim("fair", num_blocks=20)
    for _ in range(400):
        for tenant, share in (("one", 1), ("three", 3)):
            while sim.waiting(tenant) < 10:
                sim.add(8, 8, tenant=tenant, share=share)
        sim.step()
    assert 2.6 < sim.service["three"] / sim.service["one"] < 3.4


def test_the_accounts_charge_what_was_served_once():
    sim = Sim("fair", num_blocks=7)
    for tenant in "ab":
        sim.add(9, 12, tenant=tenant)
    while sim.scheduler.running or sim.scheduler.waiting:
        sim.step()
    assert sim.scheduler.preemptions > 0
    assert sim.scheduler.accounts is not None
    # the last token of a sequence ends it: it is never computed, but it was drawn
    assert sim.scheduler.accounts.counters == dict.fromkeys("ab", PROMPT_WEIGHT * 9 + OUTPUT_WEIGHT * 12)
    assert sim.service == sim.scheduler.accounts.counters


def test_staying_away_saves_nothing_up():
    """A tenant that was idle shares from now on; it is not owed what others got meanwhile."""
    sim = Sim("fair", num_blocks=100, max_batch=1)
    for _ in range(100):
        while sim.waiting("busy") < 2:
            sim.add(4, 4, tenant="busy")
        sim.step()
    order = []
    for _ in range(60):
        for tenant in ("busy", "back"):
            while sim.waiting(tenant) < 2:
                sim.add(4, 4, tenant=tenant)
        order += [run.sequence.tenant for run in sim.step().runs if run.start == 0]
    assert "back" in order[:2]
    assert abs(order.count("back") - order.count("busy")) <= 2


def test_tenants_are_not_remembered_for_ever():
    sim = Sim("fair", num_blocks=100, max_batch=8)
    accounts = sim.scheduler.accounts
    assert accounts is not None
    for index in range(3000):
        sim.add(4, 2, tenant=f"t{index}-")
        sim.step()
    assert len(accounts.counters) <= 1100


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.integers(-1, 2), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(8, 20),
    st.integers(1, 4),
    st.integers(1, 24),
    st.sampled_from(["priority", "fcfs"]),
)
def test_nobody_is_admitted_before_one_of_higher_rank(wanted, num_blocks, max_batch, max_tokens, scheduling):
    sim = Sim(scheduling, num_blocks, max_batch, max_tokens)
    for step in range(1500):
        for (prompt, output), priority, start in wanted:
            if start == step:
                sim.add(prompt, output, priority=priority)
        if step > 30 and not sim.scheduler.running and not sim.scheduler.waiting:
            break
        waiting = list(sim.scheduler.waiting)
        decision = sim.step()
        admitted = [run.sequence for run in decision.runs if run.sequence in waiting]
        passed = [sequence for sequence in waiting if sequence not in admitted]
        assert (
            not passed
            or not admitted
            or max(sequence.rank for sequence in admitted) < min(sequence.rank for sequence in passed)
        )
    assert not sim.scheduler.running
    assert not sim.scheduler.waiting


@pytest.mark.parametrize(
    ("scheduling", "order"),
    [("fcfs", ["a0", "a1", "b2", "b3"]), ("priority", ["b3", "a1", "a0", "b2"]), ("fair", ["a0", "b2", "a1", "b3"])],
)
def test_what_each_policy_looks_at(scheduling, order):
    sim = Sim(scheduling, num_blocks=100, max_batch=1)
    for tenant, priority in zip("aabb", (1, 0, 2, -1), strict=True):
        sim.add(4, 3, tenant=tenant, priority=priority)
    started = []
    while sim.scheduler.running or sim.scheduler.waiting:
        started += [run.sequence.key for run in sim.step().runs if run.start == 0]
    assert started == order


def test_the_engine_takes_tenants_from_requests():
    adapter = TinyAdapter(tiny_model())
    config = AutoregressiveConfig(num_blocks=64, block_size=8, max_batch=1, scheduling="fair")
    drive = Driver(AutoregressiveEngine(adapter, config))
    for index, prompt in enumerate(prompts(4, (9, 9, 9, 9))):
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        request = stage_request(f"r{index}", sampling=sampling)
        request.request = Request(request_id=f"r{index}", tenant="late" if index == 3 else "early")
        drive.add(request, prompt)
    drive.run()
    assert list(drive.results) == ["r0", "r3", "r1", "r2"]


def test_a_policy_that_does_not_exist():
    with pytest.raises(ConfigError, match="scheduling is 'lifo'; it must be one of fcfs, priority, fair"):
        AutoregressiveConfig(num_blocks=4, scheduling="lifo")
