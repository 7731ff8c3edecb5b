"""Workers move from one stage to another while requests run: on command, and by the deployment's policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_system import Recorded, System, all_ready, assert_right, both, collect, held, kill

from segue.graph.deployment.deployment import Hardware, MovePolicy
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import InvalidRequest, Overloaded, ShuttingDown, StageLost
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.workers.replicas import Replicas
from segue.orchestrator.workers.scaling.crew import Crew
from segue.orchestrator.workers.scaling.move_policy import decide
from segue.orchestrator.workers.scaling.moves import Moves

pytestmark = pytest.mark.usefixtures("toy_path")

TWO_COUNTERS = {"counter": {"replicas": 2}}


# ── the policy ─────────────────────────────────────────────────────────────────────────────────────────────────────

STAGES = "abcd"
ages = st.sampled_from([0.0, 0.5, 1.0, 5.0, 60.0])


@st.composite
def crews(draw: st.DrawFn) -> list[Crew]:
    names = STAGES[: draw(st.integers(1, len(STAGES)))]
    rooms = st.frozensets(st.sampled_from(names))
    counts = st.integers(0, 3)
    return [Crew(name, draw(counts), draw(ages), draw(st.integers(0, 9)), draw(rooms) - {name}) for name in names]


@given(st.builds(MovePolicy, st.sampled_from([0.5, 5.0]), st.sampled_from([1.0, 60.0])), crews(), ages)
def test_the_policy_never_takes_a_last_worker_and_helps_the_oldest_queue(
    policy: MovePolicy, crews: list[Crew], since_last: float
) -> None:
    decision = decide(policy, crews, since_last)
    by_name = {crew.stage: crew for crew in crews}

    def can(source: Crew, target: Crew) -> bool:
        return source.ready > 1 and source.queue_age == 0 and target.stage in source.room_for

    old = [crew for crew in crews if crew.queue_age >= policy.queue_age and any(can(one, crew) for one in crews)]
    if since_last < policy.cooldown or not old:
        assert decision is None
        return
    assert decision is not None
    source, target = by_name[decision.source], by_name[decision.target]
    assert can(source, target)
    assert target.queue_age == max(crew.queue_age for crew in old)
    assert all(source.requests / source.ready <= one.requests / one.ready for one in crews if can(one, target))


# ── moves ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def workers(omni: AsyncOmni) -> dict[str, int]:
    stages = omni.health().stages
    return {name: sum(one.state == "ready" for one in stages[name].replicas) for name in ("counter", "tone")}


def test_a_worker_moves_under_load_and_nothing_is_lost(system: System, tmp_path: Path) -> None:
    """There and back, while requests run; on the way back they outlast the drain time."""

    async def body() -> None:
        async with system.own(stages=TWO_COUNTERS, limits={"drain_seconds": 0.5, "max_retries": 0}) as omni:
            await all_ready(omni)
            texts = [f"load {number}" for number in range(20)]
            tasks = [asyncio.create_task(collect(omni, both(text))) for text in texts]
            moved = await omni.move_worker("counter", "tone")
            assert (moved.from_stage, moved.to_stage, moved.worker) == ("counter", "tone", "tone.1-1")
            assert workers(omni) == {"counter": 1, "tone": 2}
            for task, text in zip(tasks, texts, strict=True):
                output = await task
                assert_right(output, text)
                assert output.metrics.attempts == 1
            async with held(omni, tmp_path, "tone"):
                moving = asyncio.create_task(omni.move_worker("tone", "counter"))
                while workers(omni)["tone"] == 2:
                    await asyncio.sleep(0)
                with pytest.raises(Overloaded, match="moving already"):
                    await omni.move_worker("tone", "counter")
                await moving
                assert workers(omni) == {"counter": 2, "tone": 1}
            assert b"segue_worker_moves_total 2.0" in omni.metrics()

    system.run(body)


@pytest.mark.nightly
def test_a_worker_that_dies_while_it_drains_moves_all_the_same(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        async with system.own(stages=TWO_COUNTERS, limits={"drain_seconds": 100}) as omni:
            await all_ready(omni)
            async with held(omni, tmp_path, "counter"):
                moving = asyncio.create_task(omni.move_worker("counter", "tone"))
                while workers(omni)["counter"] == 2:
                    await asyncio.sleep(0)
                [draining] = [one for one in omni.orchestrator.replicas.all if one.state == "draining"]
                assert draining.pid is not None
                await kill(draining.pid)
                assert (await moving).to_stage == "tone"
                assert workers(omni) == {"counter": 1, "tone": 2}

    system.run(body)


def test_what_cannot_move_is_refused_by_name(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            for source, target, message in (
                ("counter", "tone", "from_stage is 'counter', which has 1 ready worker; it must have at least 2"),
                ("countr", "tone", "from_stage is 'countr', which is no stage .*did you mean 'counter'"),
                (
                    "counter",
                    "input",
                    "to_stage is 'input', which is no stage whose workers can move; known: counter, tone",
                ),
                ("tone", "tone", "to_stage is 'tone'; it must be a stage that shares no worker with 'tone'"),
            ):
                with pytest.raises(InvalidRequest, match=message) as caught:
                    await omni.move_worker(source, target)
                assert caught.value.field in ("from_stage", "to_stage")
            assert omni.health().ready

    system.run(body)


def idle_moves(shares: dict[str, float]) -> tuple[Moves, Replicas, Recorded]:
    """Two thinkers and a talker, all ready and without requests."""
    graph = StageGraph("two")
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("talker", "autoregressive", gives={"audio"})
    graph.edge("thinker", "talker")
    stages: dict[str, Any] = {name: {"memory_share": share} for name, share in shares.items()}
    stages["thinker"]["replicas"] = 2
    plan = load_plan(graph, {"stages": stages}, hardware=Hardware(2, 1 << 34))
    replicas = Replicas(plan.groups, plan.stages)
    for replica in replicas.all:
        replica.incarnation, replica.state = 1, "ready"
    processes = Recorded()
    return Moves(plan, replicas, {}, processes), replicas, processes


def test_a_move_that_does_not_fit_is_refused() -> None:
    async def body() -> None:
        moves, _, processes = idle_moves({"thinker": 0.1, "talker": 0.6})
        with pytest.raises(InvalidRequest, match="memory shares would add up to more than 1 on cpu"):
            moves.begin("thinker", "talker")
        assert not processes.done
        assert not moves.running

    asyncio.run(body())


def test_a_worker_that_cannot_load_the_other_stage_goes_back() -> None:
    async def body() -> None:
        moves, replicas, processes = idle_moves({"thinker": 0.3, "talker": 0.3})
        done = moves.begin("thinker", "talker")
        [leaving] = [one for one in replicas.all if one.state == "draining"]
        assert processes.done.pop() == ("send", "Shutdown")
        stayed = next(one for one in replicas.of_group(("thinker",)) if one is not leaving)
        assert not moves.exited(stayed)
        assert moves.exited(leaving)
        assert processes.done.pop() == ("spawn", "talker.1-1")
        loading = replicas.of_group(("talker",))[1]
        assert not moves.exited(loading), "it is tried again"
        moves.failed(loading)
        assert processes.done == [("spawn", f"thinker.{leaving.index}-2")], "a name is used once"
        with pytest.raises(StageLost, match="could not load stage 'talker', and went back"):
            await done
        assert [len(replicas.of_group((name,))) for name in ("thinker", "talker")] == [2, 1]
        assert not moves.running
        assert moves.count == 0

    asyncio.run(body())


def test_a_stop_ends_a_move() -> None:
    async def body() -> None:
        moves, replicas, _ = idle_moves({"thinker": 0.3, "talker": 0.3})
        for replica in replicas.all:
            replica.requests.add("one")
        done = moves.begin("thinker", "talker")
        moves.stop()
        with pytest.raises(ShuttingDown):
            await done
        with pytest.raises(ShuttingDown):
            moves.begin("thinker", "talker")

    asyncio.run(body())


def test_the_policy_moves_a_worker_to_an_old_queue(system: System) -> None:
    async def body() -> None:
        stages = {"tone": {"replicas": 2}, "counter": {"max_batch": 1}}
        async with system.own(stages=stages, moves={"queue_age": 0.05, "cooldown": 600}) as omni:
            await all_ready(omni)
            omni.orchestrator.supervisor.moves.consider(float("inf"))
            assert workers(omni) == {"counter": 1, "tone": 2}, "nothing waits"
            while workers(omni) != {"counter": 2, "tone": 1}:
                texts = [f"wait {number}" for number in range(40)]
                for output, text in zip(
                    await asyncio.gather(*(collect(omni, both(text)) for text in texts)), texts, strict=True
                ):
                    assert_right(output, text)

    system.run(body)
