"""A stage's workers come and go by its load: the policy, what is done about it, and a running system under load."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_system import Recorded, System, all_ready, assert_right, both, collect, held, kill

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.deployment.stage_plan import Scaling
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import Overloaded
from segue.messages.stats import WorkerStats
from segue.messages.wire import Stats
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.scaling.crew import Crew
from segue.orchestrator.workers.scaling.moves import Moves
from segue.orchestrator.workers.scaling.scale_policy import Grow, Shrink, is_calm, next_change

pytestmark = pytest.mark.usefixtures("toy_path")


# ── the policy ─────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def scalings(draw: st.DrawFn) -> Scaling:
    least = draw(st.integers(1, 3))
    seconds = st.sampled_from([1.0, 3.0, 10.0])
    return Scaling(least, least + draw(st.integers(0, 4)), draw(seconds), draw(seconds), draw(seconds))


@st.composite
def crews(draw: st.DrawFn) -> list[Crew]:
    times = st.sampled_from([0.0, 1.0, 5.0, 60.0, 300.0])
    found = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        workers = draw(st.integers(0, 6))
        found.append(
            Crew(
                name,
                ready=draw(st.integers(0, workers)),
                queue_age=draw(times),
                requests=draw(st.integers(0, 9)),
                workers=workers,
                room=draw(st.booleans()),
                scaling=draw(st.none() | scalings()),
                calm=draw(times),
                since_change=draw(times),
                failures=draw(st.integers(0, 3)),
            )
        )
    return found


@given(crews())
def test_the_range_and_the_pauses_are_kept_and_the_most_urgent_stage_comes_first(crews: list[Crew]) -> None:
    def scaling_of(crew: Crew) -> Scaling:
        assert crew.scaling is not None
        return crew.scaling

    rested = [
        crew
        for crew in crews
        if crew.scaling is not None and crew.since_change >= crew.scaling.cooldown * 2**crew.failures
    ]
    below = [crew for crew in rested if crew.room and crew.workers < scaling_of(crew).least]
    late = [
        crew
        for crew in rested
        if crew.room and crew.workers < scaling_of(crew).most and crew.queue_age >= scaling_of(crew).queue_age
    ]
    calm = [crew for crew in rested if crew.calm >= scaling_of(crew).idle]
    by_name = {crew.stage: crew for crew in crews}

    match next_change(crews):
        case Grow(stage):
            grown = by_name[stage]
            assert grown in (below or late)
            assert all(
                grown.queue_age / scaling_of(grown).queue_age >= one.queue_age / scaling_of(one).queue_age
                for one in (below or late)
            )
        case Shrink(stage):
            assert not below
            assert not late
            assert by_name[stage] in calm
            assert by_name[stage].calm == max(one.calm for one in calm)
        case None:
            assert not below
            assert not late
            assert not calm


@given(st.integers(0, 9), st.sampled_from([0.0, 0.1]), st.integers(0, 40), st.integers(1, 8), scalings())
def test_a_stage_that_is_calm_keeps_its_least_and_is_half_full_at_most_after_it_has_shrunk(
    ready: int, age: float, requests: int, batch: int, scaling: Scaling
) -> None:
    if is_calm(ready, age, requests, batch, scaling):
        assert age == 0
        assert ready - 1 >= scaling.least
        assert requests <= (ready - 1) * batch / 2


@given(scalings(), st.integers(1, 4), st.lists(st.integers(0, 30), min_size=1, max_size=3), st.integers(0, 5))
def test_a_load_that_stays_settles_at_a_number_that_serves_it(
    scaling: Scaling, batch: int, loads: list[int], loading: int
) -> None:
    """Second by second: requests beyond what the workers hold wait, and get older. A worker takes `loading` seconds to
    start. Each load lasts until everything must have settled."""
    workers, ends, age, changed = scaling.least, 0, 0.0, -1e9
    calm_since: int | None = None
    clock = itertools.count()
    for load in loads:
        kinds: set[type] = set()
        began = now = last = next(clock)
        longest = (scaling.most + 1) * (scaling.idle + scaling.cooldown + scaling.queue_age + loading + 2)
        while now - began < 2 * longest:
            now = next(clock)
            age = age + 1 if load > workers * batch else 0.0
            if ends:  # a worker is starting: nothing else is decided
                if now >= ends:
                    workers, ends, changed, calm_since = workers + 1, 0, now, None
                continue
            if not is_calm(workers, age, load, batch, scaling):
                calm_since = None
            elif calm_since is None:
                calm_since = now
            calm = 0.0 if calm_since is None else now - calm_since
            known = Crew("a", workers, age, load, workers=workers, room=True, scaling=scaling)
            match next_change([replace(known, calm=calm, since_change=now - changed)]):
                case None:
                    continue
                case Grow():
                    ends = now + loading
                    if not loading:
                        workers, ends = workers + 1, 0
                    kinds.add(Grow)
                case Shrink():
                    workers -= 1
                    kinds.add(Shrink)
            assert now - changed >= scaling.cooldown
            assert scaling.least <= workers <= scaling.most
            last, changed, calm_since = now, now, None
        assert len(kinds) <= 1, "it goes one way"
        assert last - began < longest, "it has settled"
        assert load <= workers * batch or workers == scaling.most


# ── what is done ───────────────────────────────────────────────────────────────────────────────────────────────────


class Scaled:
    """A stage of one to three workers on this host, on node1 and on this host, and another stage."""

    def __init__(self, *, away: frozenset[str] = frozenset(), share: float = 0.1, **more: Any) -> None:
        graph = StageGraph("two")
        graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
        graph.stage("talker", "autoregressive", gives={"audio"})
        graph.edge("thinker", "talker")
        replicas = {"min": 1, "max": 3, "queue_age": 1, "idle": 30, "cooldown": 10, **more}
        stages = {
            "thinker": {"replicas": replicas, "node": ["server", "node1"], "memory_share": share, "max_batch": 4},
            "talker": {"memory_share": 0.2, "replicas": 2},
        }
        self.plan = load_plan(graph, {"stages": stages}, hardware=Hardware(2, 1 << 34))
        self.replicas = Replicas(self.plan.groups, self.plan.stages)
        for replica in self.replicas.all:
            replica.incarnation, replica.state = 1, "ready"
        self.processes = Recorded(away=away)
        self.stats: dict[str, Stats] = {}
        self.now = 0.0
        self.moves = Moves(self.plan, self.replicas, self.stats, self.processes, clock=lambda: self.now)

    @property
    def thinkers(self) -> list[Replica]:
        return self.replicas.of_group(("thinker",))

    def after(self, seconds: float, age: float) -> list[tuple[str, str]]:
        """Let time pass, at whose end the oldest request has waited so long; return what is done then."""
        self.now += seconds
        for replica in self.thinkers:
            self.stats[replica.worker] = Stats(replica.worker, [WorkerStats("thinker", 0, {"queue_age_seconds": age})])
        self.processes.done.clear()
        self.moves.consider(self.now)
        return list(self.processes.done)

    def is_ready(self, replica: Replica) -> None:
        replica.state = "ready"
        self.moves.ready(replica)


def grown(scaled: Scaled) -> Replica:
    """Let the stage get a second worker, which starts."""
    assert scaled.after(100, age=2.0) == [("spawn", "thinker.1-1")]
    return scaled.thinkers[1]


def test_a_worker_that_starts_is_no_capacity_and_nothing_else_begins_meanwhile() -> None:
    async def body() -> None:
        scaled = Scaled()
        assert scaled.after(1, age=0.9) == []
        new = grown(scaled)
        assert new.node == "node1"
        assert scaled.after(100, age=99.0) == [], "one at a time"
        with pytest.raises(Overloaded, match="added or removed"):
            scaled.moves.begin("talker", "thinker")
        scaled.is_ready(new)
        assert scaled.moves.added == 1
        assert not scaled.moves.running

    asyncio.run(body())


def test_a_worker_is_added_only_where_a_host_is_there_and_a_device_has_room() -> None:
    async def body() -> None:
        away = Scaled(away=frozenset({"node1"}))
        assert away.after(100, age=2.0) == [("spawn", "thinker.2-1")], "the next place is on this host"
        full = Scaled(away=frozenset({"node1"}), share=0.4)
        assert full.after(100, age=2.0) == [], "0.4 twice and the talkers' 0.2 twice are more than this host has"
        assert [one.worker for one in full.thinkers] == ["thinker.0-1"]
        elsewhere = Scaled(share=0.4)
        assert elsewhere.after(100, age=2.0) == [("spawn", "thinker.1-1")]

    asyncio.run(body())


def test_a_worker_that_cannot_start_is_given_up_and_the_next_attempt_waits_longer_each_time() -> None:
    async def body() -> None:
        scaled = Scaled()
        new = grown(scaled)
        for failures in (1, 2, 3):
            scaled.moves.failed(new)
            assert [one.index for one in scaled.thinkers] == [0]
            assert scaled.after(10 * 2**failures - 1, age=2.0) == []
            assert scaled.after(1, age=2.0) == [("spawn", f"thinker.1-{failures + 1}")], "a name is used once"
            new = scaled.thinkers[1]
        scaled.is_ready(new)
        assert scaled.after(10, age=2.0) == [("spawn", "thinker.2-1")], "all is forgotten"

    asyncio.run(body())


def test_the_last_worker_that_came_leaves_first_and_one_at_a_time() -> None:
    async def body() -> None:
        scaled = Scaled()
        for _ in range(2):
            scaled.after(100, age=2.0)
            scaled.is_ready(scaled.thinkers[-1])
        busy = scaled.thinkers[2]
        busy.requests.add("one")
        busy.working.add("one")
        assert scaled.after(0, age=0.0) == []
        assert scaled.after(29, age=0.0) == [], "calm, but not for long enough"
        assert scaled.after(1, age=0.0) == []
        assert busy.state == "draining"
        assert busy.alive, "it finishes what it has"
        assert scaled.after(500, age=99.0) == [], "one at a time"
        busy.requests.clear()
        busy.working.clear()
        scaled.moves.request_left()
        assert scaled.processes.done == [("send", "Shutdown")]
        assert scaled.moves.exited(busy)
        assert [one.index for one in scaled.thinkers] == [0, 1]
        assert scaled.moves.removed == 1

    asyncio.run(body())


def test_a_host_that_is_lost_takes_the_draining_worker_with_it() -> None:
    async def body() -> None:
        scaled = Scaled(idle=1, cooldown=1)
        new = grown(scaled)
        scaled.is_ready(new)
        new.requests.add("one")
        scaled.after(10, age=0.0)
        scaled.after(10, age=0.0)
        assert new.state == "draining"
        scaled.moves.failed(new)
        assert [one.index for one in scaled.thinkers] == [0]
        assert scaled.moves.removed == 1

    asyncio.run(body())


# ── a running system ───────────────────────────────────────────────────────────────────────────────────────────────

RANGE = {"min": 1, "max": 2, "queue_age": 0.02, "idle": 0.5, "cooldown": 0.1}


def count(omni: AsyncOmni, state: str = "ready") -> int:
    return sum(one.state == state for one in omni.health().stages["counter"].replicas)


@asynccontextmanager
async def load(omni: AsyncOmni) -> AsyncIterator[None]:
    """More requests than a worker takes at once, again and again; all are right."""
    over = asyncio.Event()

    async def ask() -> None:
        for turn in itertools.count():
            texts = [f"load {turn} {number}" for number in range(30)]
            outputs = await asyncio.gather(*(collect(omni, both(text)) for text in texts))
            for output, text in zip(outputs, texts, strict=True):
                assert_right(output, text)
            if over.is_set():
                return

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        over.set()
        await asking


async def until(omni: AsyncOmni, ready: int) -> None:
    while count(omni) != ready or len(omni.health().stages["counter"].replicas) != ready:
        await asyncio.sleep(0)


def test_a_worker_comes_under_load_though_its_first_process_is_killed_and_goes_when_there_is_none(
    system: System,
) -> None:
    async def body() -> None:
        stages = {"counter": {"replicas": RANGE, "max_batch": 1}}
        async with system.own(stages=stages) as omni:
            await all_ready(omni)
            async with load(omni):
                workers = omni.orchestrator.replicas.of_group(("counter",))
                while len(workers) < 2 or workers[1].pid is None:
                    await asyncio.sleep(0)
                assert workers[1].state == "starting"
                await kill(workers[1].pid)
                await until(omni, 2)
                assert omni.health().stages["counter"].replicas[1].restarts == 1
            await until(omni, 1)
            assert b"segue_workers_added_total 1.0" in omni.metrics()
            assert b"segue_workers_removed_total 1.0" in omni.metrics()
            assert_right(await collect(omni, both("afterwards")), "afterwards")

    system.run(body)


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [False, True], ids=["drains", "killed while it drains"])
def test_a_worker_that_goes_loses_no_request(system: System, tmp_path: Path, killed: bool) -> None:
    """It has a request that it may finish; or is killed with it."""

    async def body() -> None:
        stages = {"counter": {"replicas": {**RANGE, "idle": 8}, "max_batch": 4}}
        async with system.own(stages=stages, limits={"drain_seconds": 100, "max_retries": 0}) as omni:
            await all_ready(omni)
            async with load(omni):
                await until(omni, 2)
            async with held(omni, tmp_path, "counter"):
                while not (leaving := [one for one in omni.orchestrator.replicas.all if one.leaving]):
                    await asyncio.sleep(0)
                assert leaving[0].index == 1
                assert leaving[0].requests
                if killed:
                    assert leaving[0].pid is not None
                    await kill(leaving[0].pid)
                    await until(omni, 1)
            await until(omni, 1)
            assert_right(await collect(omni, both("afterwards")), "afterwards")

    system.run(body)
