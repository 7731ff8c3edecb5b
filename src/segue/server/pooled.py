"""Texts that become one vector, its classes or one number each: run side by side, a part of them at a time."""

from __future__ import annotations

from contextlib import aclosing
from typing import TypeVar

from segue.messages.deltas import ClassesDelta, EmbeddingDelta, Finished, ScoreDelta
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generations import run_generations

AT_ONCE = 32
"""Texts of one request that are in the stages at a time: a long list leaves room for others."""

D = TypeVar("D", ClassesDelta, EmbeddingDelta, ScoreDelta)


async def pooled(
    requests: list[Request], kind: type[D], field: str, service: Service, metrics: ServerMetrics
) -> tuple[list[D], int]:
    """(what each request gives, prompt tokens of all). An error about a text names `field`, as the client calls it."""
    found: list[D] = []
    tokens = 0
    for start in range(0, len(requests), AT_ONCE):
        some, used = await _part(requests[start : start + AT_ONCE], kind, field, start, service, metrics)
        found += some
        tokens += used
    return found, tokens


async def _part(
    requests: list[Request], kind: type[D], field: str, start: int, service: Service, metrics: ServerMetrics
) -> tuple[list[D], int]:
    found: dict[int, D] = {}
    tokens = 0
    try:
        async with aclosing(run_generations(service, requests, metrics, {})) as deltas:
            async for index, delta in deltas:
                if isinstance(delta, kind):
                    found[index] = delta
                elif isinstance(delta, Finished):
                    tokens += delta.usage.prompt_tokens
    except InvalidRequest as error:
        if error.field is not None and error.field.startswith("prompt"):
            error.field = field
        elif error.field is not None:  # an option of ours is a parameter of the body
            error.field = error.field.removeprefix("options.")
        raise
    if len(found) != len(requests):
        missing = next(index for index in range(len(requests)) if index not in found)
        raise StageFailed(f"{field}: text {start + missing} came to nothing")
    return [found[index] for index in range(len(requests))], tokens
