"""Orders of messages, steps, deaths and lost links, all at small bounds and many at random beyond. Nothing is lost or
comes twice, nothing of a past attempt reaches the client, and nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
from recovery_world import COUNT, NUMBERS, TONE, Event, World, plan_of

from segue.graph.deployment.deployment import Plan
from segue.messages.deltas import Finished

RIGHT = list(range(NUMBERS))
NODES = ("server", "node1", "node2")


def faults_of(world: World, kinds: set[str]) -> list[Event]:
    """What can go wrong in this state."""
    found: list[Event] = []
    if "kill" in kinds:
        found += [("kill", at, fate) for at in sorted(world.workers) for fate in ("lost", "sent")]
    if "cut" in kinds and world.cut is None:
        found += [("cut", *pair) for pair in combinations(NODES, 2)]
    return found


@dataclass(frozen=True)
class Left:
    """What a run may still do: so many faults, and so often something else than the first event that can happen."""

    faults: int
    detours: int


def search(plan: Plan, kinds: set[str], bound: Left) -> int:
    """Visit every state within the bound; return their number. A state is made again by repeating its events."""
    seen: set[tuple[Left, str]] = set()
    paths: list[tuple[tuple[Event, ...], Left]] = [((), bound)]
    while paths:
        path, left = paths.pop()
        world = World(plan)
        for event in path:
            world.do(event)
        while (key := (left, world.key())) not in seen:
            seen.add(key)
            assert world.client.samples == RIGHT[: len(world.client.samples)], path
            events = world.events()
            if left.faults and world.client.end is None:
                less = replace(left, faults=left.faults - 1)
                paths += [((*path, fault), less) for fault in faults_of(world, kinds)]
            if not events:
                assert_whole(world, path)
                break
            if left.detours:
                less = replace(left, detours=left.detours - 1)
                paths += [((*path, event), less) for event in events[1:]]
            path = (*path, events[0])
            world.do(events[0])
    return len(seen)


def assert_whole(world: World, path: tuple[Event, ...]) -> None:
    """Nothing more will happen: the client has everything, and no worker anything."""
    assert isinstance(world.client.end, Finished), (world.client.end, path)
    assert world.client.samples == RIGHT, path
    for worker in world.workers.values():
        assert not any(stage.visits for stage in worker.stages.values()), path
        assert not any(gauges["flows"] for gauges in worker.outbox.edges().values()), path
        assert not worker.early, path


def walk(plan: Plan, seed: int) -> None:
    """One run with two faults, in a random order."""
    chance, world, faults = random.Random(seed), World(plan), 2
    path: tuple[Event, ...] = ()
    while events := world.events():
        if faults and world.client.end is None and chance.random() < 0.08:
            events, faults = faults_of(world, {"kill", "cut"}), faults - 1
        path = (*path, chance.choice(events))
        world.do(path[-1])
        assert world.client.samples == RIGHT[: len(world.client.samples)], (seed, path)
    assert_whole(world, path)


def quietly(body: Callable[[Plan], int], nodes: dict[str, list[str]]) -> int:
    """Run within a loop, which the orchestrator's timers need, though none fires; hundreds of deaths log nothing."""

    async def within() -> int:
        return body(plan_of(nodes))

    logging.disable(logging.CRITICAL)
    try:
        return asyncio.run(within())
    finally:
        logging.disable(logging.NOTSET)


ALONE = {COUNT: ["node1"], TONE: ["node2"]}
SPREAD = {COUNT: ["node1"], TONE: ["node2", "server"]}


BOTH = pytest.mark.parametrize("nodes", [ALONE, SPREAD], ids=["alone", "spread"])


@BOTH
def test_no_single_fault_at_any_point_harms_the_answer(nodes: dict[str, list[str]]) -> None:
    assert quietly(lambda plan: search(plan, {"kill", "cut"}, Left(1, 0)), nodes) > 500


@pytest.mark.nightly
@BOTH
def test_no_fault_harms_the_answer_if_an_event_comes_out_of_turn(nodes: dict[str, list[str]]) -> None:
    """A fault at any point, and any one event before those that were due."""
    assert quietly(lambda plan: search(plan, {"kill", "cut"}, Left(1, 1)), nodes) > 4000


@pytest.mark.parametrize("runs", [400, pytest.param(4000, marks=pytest.mark.nightly)])
@BOTH
def test_two_faults_in_any_order_of_events_harm_no_answer(nodes: dict[str, list[str]], runs: int) -> None:
    def body(plan: Plan) -> int:
        for seed in range(runs):
            walk(plan, seed)
        return runs

    quietly(body, nodes)
