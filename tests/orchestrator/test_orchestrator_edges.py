"""Edges with little room, over the whole system."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from toy_system import Gate, System, assert_right, both, collect, kill, pid_of

from segue.messages.deltas import Delta, TextDelta

pytestmark = pytest.mark.usefixtures("toy_path")


def test_a_small_edge_budget_never_deadlocks(system: System) -> None:
    """One byte of budget and the smallest pools: every chunk waits for the one before it, and all is well."""

    async def body() -> None:
        config = {
            "edges": [{"from": "counter", "to": "tone", "budget": 1}],
            "stages": {"counter": {"kv_blocks": 6, "block_size": 4, "max_batch": 2, "max_tokens_per_step": 4}},
        }
        async with system.own(**config) as omni:
            texts = [f"t{number}" for number in range(8)]
            outputs = await asyncio.gather(*(omni.generate(both(text)) for text in texts))
            for text, output in zip(texts, outputs, strict=True):
                assert_right(output, text)

    system.run(body)


def test_a_full_edge_stops_its_upstream(system: System, tmp_path: Path) -> None:
    """While the tone is held, the counter stops where the edge's budget ends, and goes on when it is let go."""

    async def body() -> None:
        gate = Gate(tmp_path)
        config = {"edges": [{"from": "counter", "to": "tone", "budget": 2000}]}
        async with system.own(**config) as omni:
            seen: list[str] = []

            def note(delta: Delta) -> None:
                if isinstance(delta, TextDelta):
                    seen.append(delta.text)

            long = {**both("budget", hold=gate.option("tone", 6)), "sampling": {"counter": {"max_tokens": 400}}}
            long["sampling"]["counter"]["ignore_eos"] = True
            task = asyncio.create_task(collect(omni, long, note))
            held = await gate.reached()
            await omni.generate("the counter is free to serve others")
            others = await asyncio.gather(*(omni.generate(f"text {number}") for number in range(4)))
            assert len(others) == 4
            assert len("".join(seen)) < 100, "the counter ran on although nobody took what it made"
            gate.remove()
            os.close(held)
            assert_right(await task, "budget", 400)

    system.run(body)


def test_retained_payloads_over_the_limit_come_back_from_the_file(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(limits={"retained_bytes": 64}) as omni:
            task = asyncio.create_task(collect(omni, both("spill me", hold=gate.option("tone", 12))))
            held = await gate.reached()
            await kill(pid_of(omni.health(), "tone"))
            gate.remove()
            os.close(held)
            assert_right(await task, "spill me")

    system.run(body)
