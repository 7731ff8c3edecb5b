"""The generations of one request, run side by side as one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing

import msgspec

from segue.messages.deltas import Choice, ChoiceEnded, Delta, Finished, RequestMetrics, TextDelta, Usage
from segue.messages.errors import SegueError, StageFailed
from segue.messages.request import Request
from segue.observe.logging import log_event
from segue.observe.metrics import GenerationWatch, ServerMetrics
from segue.orchestrator.service import Service
from segue.server.parameters import as_written

_log = logging.getLogger("segue.server")


async def run_generations(
    service: Service,
    requests: list[Request],
    metrics: ServerMetrics,
    written: Mapping[str, str],
    prompts: Sequence[Mapping[str, str]] = (),
) -> AsyncGenerator[tuple[int, Delta]]:
    """(index of the request, delta) as they come; ends when all have finished. The first error ends all; it names
    what the client wrote (`written`: as in `Answering`; `prompts`: the same for the prompt of each request).

    At most one delta per request is held here, so a consumer that waits makes the service wait. Closing this closes
    the service's generators, which cancels what still runs.
    """
    names = [{**written, **prompts[index]} if prompts else written for index in range(len(requests))]
    streams = []
    for index, request in enumerate(requests):
        try:
            streams.append(service.stream(request))
        except SegueError as error:
            raise as_written(error, names[index]) from error
    waiting: dict[asyncio.Task[Delta], int] = {}
    with ExitStack() as stack:
        watches = [stack.enter_context(GenerationWatch(metrics)) for _ in requests]
        try:
            for index, stream in enumerate(streams):
                waiting[asyncio.ensure_future(_next(stream))] = index
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    try:
                        delta = _result(task, watches[index], requests[index].request_id)
                    except SegueError as error:
                        raise as_written(error, names[index]) from error
                    watches[index].saw(delta)
                    yield index, delta
                    if not isinstance(delta, Finished):
                        waiting[asyncio.ensure_future(_next(streams[index]))] = index
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)


async def by_choice(
    deltas: AsyncGenerator[tuple[int, Delta]], text_stage: str | None
) -> AsyncGenerator[tuple[int, Delta]]:
    """(index of the choice, delta), from those by request: every choice gets a `Finished` of its own.

    There is a request per choice, or one request with all of them as outputs of its text stage. The usage of the latter
    goes with choice 0, so that it is counted once.
    """
    async with aclosing(deltas):
        async for index, delta in deltas:
            if isinstance(delta, TextDelta):
                yield index + delta.index, delta
            elif isinstance(delta, ChoiceEnded):
                yield delta.choice.index, delta
            elif isinstance(delta, Finished) and len(delta.choices) > 1:
                assert text_stage is not None
                for choice in delta.choices:
                    yield choice.index, _of_choice(delta, choice, text_stage)
            else:
                yield index, delta


def _of_choice(whole: Finished, choice: Choice, stage: str) -> Finished:
    """The end of one of the outputs of a request."""
    return msgspec.structs.replace(
        whole,
        finish_reason=choice.finish_reason,
        token_ids={**whole.token_ids, stage: choice.token_ids},
        usage=whole.usage if choice.index == 0 else Usage(),
        choices=[choice],
    )


def early_end(ended: ChoiceEnded) -> Finished:
    """What is known of the end of a choice while others go on: all but usage and metrics."""
    choice = ended.choice
    return Finished(choice.finish_reason, {ended.stage: choice.token_ids}, Usage(), RequestMetrics(), choices=[choice])


async def _next(stream: AsyncGenerator[Delta]) -> Delta:
    try:
        return await anext(stream)
    except StopAsyncIteration as error:
        raise StageFailed("a generation ended without saying how") from error


def _result(task: asyncio.Task[Delta], watch: GenerationWatch, request_id: str) -> Delta:
    try:
        return task.result()
    except SegueError as error:
        watch.failed(error.code)
        about = {"generation": request_id, "code": error.code, "stage": error.stage, "error": error.message}
        log_event(_log, "generation failed", about, logging.ERROR if error.status >= 500 else logging.INFO)
        raise
