"""How much of what is allocated holds nothing: below the 4% that the PagedAttention paper reports."""

from __future__ import annotations

import random

import pytest
from ar_adapter import Driver, TinyAdapter, prompts, stage_request, tiny_model

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.schedule.decision import Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.scheduler import Scheduler
from segue.messages.sampling import SamplingParams

SIZE = 16


def counted(scheduler: Scheduler) -> float:
    """The same from the tables alone: every slot of every block, each block once."""
    slots: dict[tuple[int, int], bool] = {}
    for scheduled in scheduler.running:
        for table in scheduled.tables:
            for place, block in enumerate(table.blocks, table.first):
                for offset in range(SIZE):
                    holds = place * SIZE + offset < scheduled.computed
                    slots[block, offset] = slots.get((block, offset), False) or holds
    return sum(not holds for holds in slots.values()) / len(slots) if slots else 0.0


@pytest.mark.parametrize("windows", [(None,), (None, 300), (300,)])
def test_a_mixed_load_wastes_little(windows):
    """Chats with the mean lengths of ShareGPT (161 and 338 tokens: Kwon et al., §6.1), arriving at random, in a pool
    that is short at times. A windowed group holds fewer slots for the same half block at the end."""
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(len(windows) * 400), Limits(SIZE, 24, 512, windows, 256))
    totals: dict[str, int] = {}
    waste = []
    for step in range(1500):
        if rng.random() < 0.05:
            serial = len(totals)
            prompt = 4 + min(1500, int(rng.expovariate(1 / 157)))
            totals[f"r{serial}"] = prompt + 1 + min(1500, int(rng.expovariate(1 / 337)))
            scheduler.add(ScheduledSequence(f"r{serial}", (0, serial, serial), prompt, prompt))
        decision = scheduler.next()
        scheduler.apply(decision)
        for run in decision.runs:
            scheduler.advance(run.sequence, run.stop, publish=False)
            if run.stop == run.sequence.length:
                run.sequence.length = run.sequence.ready = run.sequence.length + 1
                if run.sequence.length == totals[run.sequence.key]:
                    scheduler.remove(run.sequence)
        waste.append(scheduler.waste())
        if step % 50 == 0:
            assert waste[-1] == pytest.approx(counted(scheduler))
    assert len(totals) > 50
    assert 0 < sum(waste) / len(waste) < 0.04


def test_the_gauge():
    """33 tokens in 5 blocks of 8, of which the last holds one."""
    drive = Driver(AutoregressiveEngine(TinyAdapter(tiny_model()), AutoregressiveConfig(num_blocks=64, block_size=8)))
    assert drive.engine.stats()["kv_waste"] == 0
    drive.add(stage_request("it", sampling=SamplingParams(temperature=0.0, max_tokens=20)), prompts(1, [33])[0])
    drive.step()
    assert drive.engine.stats()["kv_waste"] == pytest.approx(7 / 40)
    for _ in range(7):
        drive.step()
    assert drive.engine.stats()["kv_waste"] == 0
