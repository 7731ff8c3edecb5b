"""Runs the generations of one request concurrently and merges them into one stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec

from segue.messages.deltas import Choice, ChoiceEnded, Delta, Finished, RequestMetrics, TextDelta, Usage
from segue.messages.errors import SegueError, StageFailed
from segue.messages.request import MediaPart, Request
from segue.observe.logging import log_event
from segue.observe.metrics import GenerationWatch, ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.parameters import as_written

_log = logging.getLogger("segue.server")
AT_ONCE = 128
"""Most concurrent generations of one request."""
PER_TURN = 8
"""Most of these that start before the event loop serves other requests."""
BYTES_PER_TURN = 1 << 20
"""Most bytes of prompts and media that start before the event loop serves other requests, since it encodes them."""


async def run_generations(
    service: Service,
    requests: list[Request],
    metrics: ServerMetrics,
    written: Mapping[str, str],
    prompts: Sequence[Mapping[str, str]] = (),
    *,
    timed: bool = True,
    at_once: int = AT_ONCE,
    stream: Callable[[Request], AsyncGenerator[Delta]] | None = None,
) -> AsyncGenerator[tuple[int, Delta]]:
    """Yield (index of the request, delta) as deltas come, until all requests have finished.

    The first error ends all generations; it names the client's field (`written`: as in `Answering`; `prompts`: the same
    for the prompt of each request). At most `at_once` generations run concurrently. The event loop serves other
    requests after every `PER_TURN` starts or `BYTES_PER_TURN`, so that thousands of prompts, or large ones, block
    neither the queue nor the loop. `timed`: requests without a deadline get the server's.
    `stream`: starts a request (default: `service.stream`).

    At most one delta per request is buffered, so a slow consumer slows the service down. Closing this generator closes
    the service's generators, which cancels the running requests.
    """
    start = stream or service.stream
    deadline = deadline_of(service) if timed else None
    running: dict[int, tuple[AsyncGenerator[Delta], GenerationWatch]] = {}
    waiting: dict[asyncio.Task[Delta], int] = {}
    begun = 0

    def named(index: int) -> Mapping[str, str]:
        return {**written, **prompts[index]} if prompts else written

    try:
        while waiting or begun < len(requests):
            began_bytes = 0
            for index in range(begun, min(len(requests), begun + PER_TURN, begun + at_once - len(running))):
                request = requests[index]
                request.deadline = request.deadline or deadline
                try:
                    deltas = start(request)
                except SegueError as error:
                    raise as_written(error, named(index)) from error
                running[index] = deltas, GenerationWatch(metrics)
                waiting[asyncio.ensure_future(_next(deltas))] = index
                begun = index + 1
                began_bytes += _nbytes(request)
                if began_bytes >= BYTES_PER_TURN:
                    break
            more = begun < len(requests) and len(running) < at_once
            done, _ = await asyncio.wait(waiting, timeout=0 if more else None, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                deltas, watch = running[index]
                try:
                    delta = _result(task, watch, requests[index].request_id)
                except SegueError as error:
                    raise as_written(error, named(index)) from error
                watch.saw(delta)
                yield index, delta
                if isinstance(delta, Finished):
                    del running[index]
                    watch.close()
                    await deltas.aclose()
                else:
                    waiting[asyncio.ensure_future(_next(deltas))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(deltas.aclose() for deltas, _ in running.values()), return_exceptions=True)
        for _, watch in running.values():
            watch.close()


def deadline_of(service: Service) -> float | None:
    """The server's deadline for a request that arrives now, as Unix time; None if there is none."""
    return None if service.card.deadline is None else time.time() + service.card.deadline


def of_choices(index: int, delta: Delta, text_stage: str | None) -> list[tuple[int, Delta]]:
    """Return (choice, delta) for a delta of the request with this index; every choice gets its own `Finished`.

    Each choice is a request, or one request has all choices as outputs of its text stage. In the second case the usage
    goes with choice 0, so that it is counted once.
    """
    if isinstance(delta, TextDelta):
        return [(index + delta.index, delta)]
    if isinstance(delta, ChoiceEnded):
        return [(delta.choice.index, delta)]
    if isinstance(delta, Finished) and len(delta.choices) > 1:
        assert text_stage is not None
        return [(choice.index, _of_choice(delta, choice, text_stage)) for choice in delta.choices]
    return [(index, delta)]


def _of_choice(whole: Finished, choice: Choice, stage: str) -> Finished:
    """The `Finished` of one output of a request."""
    return msgspec.structs.replace(
        whole,
        finish_reason=choice.finish_reason,
        token_ids={**whole.token_ids, stage: choice.token_ids},
        usage=whole.usage if choice.index == 0 else Usage(),
        choices=[choice],
    )


def early_end(ended: ChoiceEnded) -> Finished:
    """The `Finished` of a choice that ends before others: without usage and metrics."""
    choice = ended.choice
    return Finished(choice.finish_reason, {ended.stage: choice.token_ids}, Usage(), RequestMetrics(), choices=[choice])


def _nbytes(request: Request) -> int:
    """Approximate size of an encoded request."""
    parts = (part for message in request.messages for part in message.content)
    content = sum(
        len(part.data) if isinstance(part, MediaPart) else len(part.text) + len(part.embeds or b"") for part in parts
    )
    ids = 4 * len(request.prompt_token_ids or ())
    return content + ids + len(request.prompt or "") + len(request.prompt_embeds or b"")


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
