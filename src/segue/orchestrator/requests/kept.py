"""Requests that others may go on from: their messages and replies, kept after their end (`Request.keep`).

A request that names one of them (`Request.previous`) gets the whole conversation before it (`Request.earlier`), and
its input stage makes one prompt of all: earlier prompts, replies exactly as they were generated, and its own messages.
So the outcome does not depend on what workers hold, and any number of requests may go on from the same one. What is
held saves computing: the worker that read the predecessor is preferred, holds its blocks for a while
(`engines/autoregressive/hold`), and shares them with each successor.

Optional reading: only for requests that are kept, or go on from kept ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass

import msgspec

from segue.graph.deployment.deployment import Limits
from segue.messages.errors import InvalidRequest, NotFound, shown, wrong
from segue.messages.request import Earlier, Part, Request, TextPart
from segue.orchestrator.requests.request_state import RequestState
from segue.orchestrator.service import ModelCard

Key = tuple[str, str]
"""(tenant, name)"""

_UNIT_BYTES = 8
"""Counted for each token id or code."""
_REQUEST_BYTES = 1024
"""Counted for each request, beside its content."""


@dataclass(slots=True)
class _Kept:
    conversation: list[Earlier]
    """The request and its reply last."""
    request: Request
    workers: frozenset[str]
    """Those that served it."""
    timer: asyncio.TimerHandle


class KeptRequests:
    """What is retained, within `limits.max_kept`, `kept_bytes` and `kept_seconds`; the oldest is forgotten first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._holders: Counter[int] = Counter()
        """How many conversations have an entry, by `id` of the entry: those that branch share their beginning."""
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, state: RequestState) -> None:
        """Retain a request that has ended as it should."""
        own = msgspec.structs.replace(state.request, earlier=[])
        key = (own.tenant, own.keep)
        units = next(iter(state.resume(state.reader)), [])
        ends = [end.units for end in state.turns.get(state.reader, [])]
        images = [state.images[index] for index in sorted(state.images)]
        conversation = [*state.request.earlier, Earlier(own, units, ends, images)]
        self.forget(key)
        timer = asyncio.get_running_loop().call_later(self._limits.kept_seconds, self.forget, key)
        self._kept[key] = _Kept(conversation, own, frozenset(state.workers()), timer)
        for one in conversation:
            self._holders[id(one)] += 1
            if self._holders[id(one)] == 1:
                self.nbytes += _size(one)
        while len(self._kept) > self._limits.max_kept or self.nbytes > self._limits.kept_bytes:
            self.forget(next(iter(self._kept)))

    def follow(self, request: Request) -> frozenset[str]:
        """Give a request the conversation of its `previous`; return the workers that served that one.
        Raises `NotFound`."""
        kept = self._kept.get((request.tenant, request.previous or ""))
        if kept is None:
            raise NotFound(
                f"previous is {shown(request.previous)}, which is not kept: it has not ended, it failed, it did not "
                f"ask to be kept, or it was forgotten (limits.kept_seconds is {self._limits.kept_seconds:g}, max_kept "
                f"{self._limits.max_kept}); send the whole conversation",
                field="previous",
            )
        request.earlier = kept.conversation
        if request.cache_salt is None:
            request.cache_salt = kept.request.cache_salt
        return kept.workers

    def forget(self, key: Key) -> None:
        """Forget a request; those that go on from it keep what they have of it. Unknown keys are ignored."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        kept.timer.cancel()
        for one in kept.conversation:
            self._holders[id(one)] -= 1
            if not self._holders[id(one)]:
                del self._holders[id(one)]
                self.nbytes -= _size(one)

    def clear(self) -> None:
        """Forget all."""
        for key in list(self._kept):
            self.forget(key)


def check_kept(request: Request, card: ModelCard) -> None:
    """Raise `InvalidRequest`, naming the field, for a request that the model cannot keep or go on with."""
    for field, asked in (("previous", request.previous is not None), ("keep", bool(request.keep))):
        if asked and not card.goes_on:
            raise InvalidRequest(
                f"{field} is set, but {card.name} does not go on from earlier requests: send the whole conversation",
                field=field,
            )
        if asked and request.open:
            raise InvalidRequest(f"{field} is set, but an open request goes on by what is appended to it", field=field)
    if request.keep:
        for stage, sampling in request.sampling.items():
            if (sampling.n or 1) > 1:
                raise wrong(f"sampling.{stage}.n", sampling.n, "1 if keep is set: others go on from one output")
    if request.previous is not None and request.prompt_embeds is not None:
        raise InvalidRequest(
            "prompt_embeds and previous are set; go on with messages, a prompt or prompt_token_ids", field="previous"
        )


def _size(one: Earlier) -> int:
    """About as many bytes as an entry takes."""
    request = one.request
    parts: list[Part] = [part for message in request.messages for part in message.content]
    content = sum(map(_part_size, [*parts, *one.images]))
    content += len(request.prompt or "") + len(request.prompt_embeds or b"")
    units = sum(len(unit) if isinstance(unit, list) else 1 for unit in one.units)
    return _REQUEST_BYTES + content + _UNIT_BYTES * (units + len(request.prompt_token_ids or ()))


def _part_size(part: Part) -> int:
    return len(part.text) + len(part.embeds or b"") if isinstance(part, TextPart) else len(part.data)
