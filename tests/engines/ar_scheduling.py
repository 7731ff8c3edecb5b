"""A scheduler without an engine: its sequences, and a step that computes all that was decided."""

from __future__ import annotations

from segue.engines.autoregressive.cache.blocks import ROOT, BlockPool, block_hash
from segue.engines.autoregressive.schedule.decision import Decision, Limits, ScheduledSequence
from segue.engines.autoregressive.schedule.scheduler import Scheduler

SIZE = 4


def hashes(prompt: str) -> list[bytes]:
    keys = [ROOT]
    for start in range(0, len(prompt) - SIZE + 1, SIZE):
        keys.append(block_hash(keys[-1], prompt[start : start + SIZE].encode()))
    return keys[1:]


def new_sequence(
    key: str, length: int, *, priority: int = 0, arrival: float = 0.0, serial: int = 0, prompt: str = ""
) -> ScheduledSequence:
    return ScheduledSequence(key, (priority, arrival, serial), length, length, hashes=hashes(prompt))


def make(
    num_blocks: int, *, max_batch: int = 4, max_tokens: int = 16, windows=(None,), prefill_chunk: int | None = None
) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), Limits(SIZE, max_batch, max_tokens, windows, prefill_chunk))


def advance(scheduler: Scheduler) -> Decision:
    """One step of a model that does what it is told; finished prefills get their next token."""
    decision = scheduler.next()
    assert decision == scheduler.next(), "schedule changed something"
    scheduler.apply(decision)
    for run in decision.runs:
        scheduler.advance(run.sequence, run.stop, publish=True)
        if run.stop == run.sequence.length:
            run.sequence.length += 1
            run.sequence.ready = run.sequence.length
    scheduler.audit()
    return decision
