"""An open request: its input is appended while it runs.

    request = omni.open(omni.request("Once upon a time"))
    await request.append(" there was")       # prefilled at once; the model writes nothing yet
    await request.append(" a", reply=True)   # the model replies, then waits
    async for delta in request.turn(): ...   # up to `TurnEnded`
    await request.append(" The next day,")
    await request.close()                    # the model replies to what it has not replied to, and the request ends
    async for delta in request: ...          # up to `Finished`

What was generated stays part of the context. The outcome does not depend on how the input is split, nor on when the
pieces arrive (`segue.engines.autoregressive.hold`); text is tokenized piece by piece. `max_tokens` counts per reply.

Optional reading: only for requests whose input is appended while they run.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

import msgspec

from segue.graph.parts import TOKENS
from segue.media.parts import tensors_from
from segue.media.sources import PYTHON_POLICY
from segue.messages.deltas import Delta, Finished, TurnEnded
from segue.messages.errors import InvalidRequest, TooLarge, wrong
from segue.messages.limits import RequestLimits, check_carried
from segue.messages.request import Appended, Request
from segue.messages.tensors import TensorSpec, check_tensors
from segue.orchestrator.requests.request_state import RequestState
from segue.orchestrator.service import ModelCard

TOKEN_BYTES = 4
"""Bytes that a token id counts for `max_appended_bytes`."""


class Requests(Protocol):
    """The calls of the orchestrator for one request."""

    def admit(self, request: Request) -> RequestState: ...

    def stream(self, asked: RequestState) -> AsyncGenerator[Delta]: ...

    def append(self, state: RequestState, piece: Appended | None) -> bool: ...

    def cancel(self, state: RequestState) -> None: ...


class OpenRequest:
    """A running request, and an async iterator of its deltas, `Finished` last. Leaving its context cancels it."""

    def __init__(
        self,
        requests: Requests,
        request: Request,
        limits: RequestLimits,
        tensors: Mapping[str, TensorSpec] = MappingProxyType({}),
    ) -> None:
        """Admits the request. `tensors`: those that the model takes. Raises `SegueError`."""
        self._specs = tensors
        self._items: dict[str, int] = {}
        """Tensor → items so far."""
        check_tensors(request.tensors(), tensors, self._items)
        self._requests = requests
        self._limits = limits
        self._books = requests.admit(request)
        self._deltas = requests.stream(self._books)
        self._pieces = 0
        self._bytes = 0
        self._closed = False

    @property
    def request_id(self) -> str:
        return self._books.id

    async def append(self, piece: str | Iterable[int] | Mapping[str, Any], *, reply: bool = False) -> None:
        """Append text, token ids, or tensors by name to the input; with `reply`, the model then replies to all that it
        has not replied to. Raises `InvalidRequest` or `TooLarge`, naming the limit, and then nothing was appended."""
        self._check_going_on()
        if not self._take(piece_of(piece, reply)):
            raise InvalidRequest(f"append was called after request {self.request_id!r} had ended", field="append")

    def _take(self, made: Appended) -> bool:
        """Give a piece to the request; False if it has ended. Raises `InvalidRequest` or `TooLarge`."""
        size = len((made.prompt or "").encode()) + TOKEN_BYTES * len(made.prompt_token_ids or ())
        size += sum(len(part.data) for part in made.tensors)
        if self._pieces >= (most := self._limits.max_appends):
            raise InvalidRequest(
                f"append was called {most} times, as often as limits.max_appends allows", field="append"
            )
        if self._bytes + size > (most := self._limits.max_appended_bytes):
            raise TooLarge(
                f"append has {size} bytes after {self._bytes} before; at most {most} are taken "
                "(limits.max_appended_bytes)",
                field="append",
            )
        check_tensors(made.tensors, self._specs, self._items)
        self._pieces += 1
        self._bytes += size
        return self._requests.append(self._books, made)

    async def follow(self, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        """Append pieces as they come, and close the input at their end; yield the deltas meanwhile, `Finished` last.
        Raises what `pieces` raises, after the deltas that are there by then."""
        appending = asyncio.create_task(self._append_all(pieces))
        following: asyncio.Task[Delta] | None = None
        try:
            while True:
                following = asyncio.create_task(_next(self._deltas))
                if appending.done():
                    await asyncio.sleep(0)  # a delta that waits goes before an error
                else:
                    await asyncio.wait((appending, following), return_when=asyncio.FIRST_COMPLETED)
                if not following.done() and appending.done():
                    appending.result()
                delta = await following
                yield delta
                if isinstance(delta, Finished):
                    return
        finally:
            tasks = [appending, *([] if following is None else [following])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pieces.aclose()

    async def _append_all(self, pieces: AsyncGenerator[str | Appended]) -> None:
        async for piece in pieces:
            if not self._take(piece if isinstance(piece, Appended) else piece_of(piece, reply=False)):
                return
        await self.close()

    async def close(self) -> None:
        """End the input. The model replies to what it has not replied to, then the request ends. Idempotent."""
        if not self._closed:
            self._closed = True
            self._requests.append(self._books, None)

    async def turn(self) -> AsyncGenerator[Delta]:
        """Yield the deltas of a reply, up to its `TurnEnded`, or to `Finished`."""
        async for delta in self._deltas:
            yield delta
            if isinstance(delta, TurnEnded | Finished):
                return

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

    async def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        self._closed = True
        self._requests.cancel(self._books)
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    def _check_going_on(self) -> None:
        if self._closed:
            raise InvalidRequest("append was called after the input was closed", field="append")


async def _next(deltas: AsyncGenerator[Delta]) -> Delta:
    return await anext(deltas)


def piece_of(piece: str | Iterable[int] | Mapping[str, Any], reply: bool) -> Appended:
    """A piece from text, token ids, or tensors by name. Raises `InvalidRequest`."""
    if not isinstance(reply, bool):
        raise wrong("reply", reply, "true or false")
    if isinstance(piece, str):
        if not piece:
            raise wrong("append", piece, "text of at least one character")
        check_carried(piece, "append")
        return Appended(prompt=piece, reply=reply)
    if isinstance(piece, Mapping):
        if not piece:
            raise wrong("append", piece, "a mapping of at least one tensor")
        return Appended(tensors=tensors_from(piece, PYTHON_POLICY, "append"), reply=reply)
    try:
        ids = [operator.index(token) for token in piece]
    except TypeError as error:
        raise wrong("append", piece, "text, a list of token ids, or a mapping of tensors") from error
    if not ids:
        raise wrong("append", ids, "a list of at least one token id")
    check_carried(ids, "append")
    return Appended(prompt_token_ids=ids, reply=reply)


def opened(request: Request, card: ModelCard, *, reply: bool) -> Request:
    """The request as an open one. Raises `InvalidRequest`, naming the field, if the model or it cannot be open."""
    if not card.appends:
        raise InvalidRequest(
            f"{card.name} takes its whole input at once: nothing can be appended to a running request", field="open"
        )
    if not isinstance(reply, bool):
        raise wrong("reply", reply, "true or false")
    if TOKENS in request.modalities:
        raise wrong("modalities", request.modalities, f"without {TOKENS!r} if the request is open")
    if request.media_kinds() and not card.tensors:
        raise wrong("messages", sorted(request.media_kinds()), "text alone if the request is open")
    for stage, sampling in request.sampling.items():
        outputs = (("n", sampling.n), ("best_of", sampling.best_of), ("beam_width", sampling.beam_width))
        for name, value in outputs:
            if (value or 1) > 1:
                raise wrong(f"sampling.{stage}.{name}", value, "1 if the request is open: it has one output")
        for name, cut in (
            ("truncate_prompt_tokens", sampling.truncate_prompt_tokens),
            ("prompt_logprobs", sampling.prompt_logprobs),
        ):
            if cut is not None:
                raise wrong(f"sampling.{stage}.{name}", cut, "left out if the request is open")
    return msgspec.structs.replace(request, open=True, reply=reply)
