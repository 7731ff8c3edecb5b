"""Run Segue's side: every request alone, then all of them at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segue.graph.deployment.deployment import Hardware
from segue.messages.errors import InvalidRequest, SegueError
from segue.messages.request import Request
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput
from segue.verify.fits import memory_shares
from segue.verify.questions import Question, sampling_stages
from segue.verify.subject import Subject

LONGEST = 8192
"""Longest sequence in tokens for which memory is kept: the requests are short."""
MOST_AT_ONCE = 8
"""Requests in a batch: the number of questions, so that no memory is kept for more."""
ALONE, TOGETHER = "alone", "together"


@dataclass
class Served:
    """Segue's results for one question."""

    question: Question
    request: Request | None = None
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    """`ALONE` or `TOGETHER` → the output."""
    seconds: float = 0.0
    """Duration of the request alone."""
    refused: str | None = None
    """Why this model refuses the question, if it is optional."""
    error: str | None = None


def deployment(subject: Subject, hardware: Hardware, device: str, dtype: str, ranks: int = 1) -> dict[str, Any]:
    """Return a deployment in which each stage's memory holds its weights and a small cache (`fits`), prompts are
    prefilled in several steps, and little memory is kept for long prompts."""
    stages: dict[str, dict[str, Any]] = {
        name: dict(share) for name, share in memory_shares(subject, hardware, device, dtype, ranks).items()
    }
    for one in sampling_stages(subject):
        stage = stages.setdefault(one.name, {})
        stage["max_batch"] = MOST_AT_ONCE
        if subject.context is not None:
            stage["max_tokens_per_step"] = max(32, min(256, subject.context // 8))
            stage["max_model_len"] = min(LONGEST, subject.context)
    return {"stages": stages} if stages else {}


async def serve(
    subject: Subject,
    asked: Sequence[Question],
    dtype: str,
    config: Path | Mapping[str, Any] | None,
    tensor_parallel: int | None,
    say: Callable[[str], None],
) -> list[Served]:
    """Start the model and serve all questions. Raises `SegueError` if the model cannot start."""
    omni = AsyncOmni(subject.model_dir, dtype=dtype, config=config, tensor_parallel=tensor_parallel)
    began = time.monotonic()
    try:
        await omni.start()
        say(f"Segue is ready after {time.monotonic() - began:.0f} s")
        served = [await _alone(omni, question, say) for question in asked]
        well = [one for one in served if one.request is not None]
        began = time.monotonic()
        again = await asyncio.gather(*(_output(omni, one.question) for one in well), return_exceptions=True)
        say(f"Segue: all {len(well)} at once, {time.monotonic() - began:.1f} s")
        for one, output in zip(well, again, strict=True):
            if isinstance(output, SegueError):
                one.error = f"with the others: {output.message}"
            elif isinstance(output, BaseException):
                raise output
            else:
                one.outputs[TOGETHER] = output
        return served
    finally:
        await omni.stop(drain=False)


async def _alone(omni: AsyncOmni, question: Question, say: Callable[[str], None]) -> Served:
    served = Served(question)
    began = time.monotonic()
    try:
        served.outputs[ALONE] = await _output(omni, question)
        served.request = omni.request(question.prompt)
    except InvalidRequest as error:
        if question.optional:
            served.refused = error.message
        else:
            served.error = error.message
    except SegueError as error:
        served.error = error.message
    served.seconds = time.monotonic() - began
    outcome = "refused" if served.refused else "FAILED" if served.error else f"{served.seconds:.1f} s"
    say(f"Segue: {question.name}: {outcome}")
    return served


async def _output(omni: AsyncOmni, question: Question) -> RequestOutput:
    return await omni.output(omni.request(question.prompt))
