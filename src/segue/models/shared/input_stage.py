"""The base class of input stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.engines.contract import Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.media.limits import DecodeBudget
from segue.messages.errors import InvalidRequest, SegueError
from segue.messages.request import Message, Request

THEN = "then"
"""Key of a payload: what follows this piece of an open request."""


@dataclass(frozen=True, slots=True)
class _Appended:
    """A piece of an open request's input, as a request of its own."""

    request: Request


class InputStage(ABC):
    """`ModuleModel` that works on the request itself: one item per request, or per piece of an open one."""

    budget: DecodeBudget | None = None
    """Decoding budget for the media of each request, if the model takes media."""
    takes_embeds = False
    """Whether parts of messages may be embeddings (`TextPart.embeds`)."""
    goes_on = False
    """Whether `process` makes one prompt of a request and those before it (`Request.earlier`)."""
    alone = False
    """Whether each request is a call of its own: no request then waits until the media of another are decoded."""

    @abstractmethod
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""

    def process_appended(self, request: Request) -> Payload:
        """The payload of a piece that was appended to an open request. Raises `InvalidRequest`."""
        return self.process(request)

    def pieces(self, request: Request, *, appended: bool) -> list[Request]:
        """The pieces of a request, or of what was appended to it, that the model takes one after the other: the first
        by `process` (by `process_appended` if `appended`), the others as if they were appended. `open` and `reply` of
        each say what follows it. Raises `InvalidRequest`."""
        return [request]

    def warm_up(self) -> None:
        """Process one short text, unless the stage accepts none (no tokenizer)."""
        self.result(Request(request_id="warm-up", prompt="Good morning!"))

    def begin(self, request: StageRequest) -> tuple[Any, list[Work]]:
        """One work item for each piece of the request. More follow if it is open."""
        asked = request.request
        first, *others = self.pieces(asked, appended=False)
        bucket = asked.request_id if self.alone else None
        items: list[Request | _Appended] = [first, *(_Appended(piece) for piece in others)]
        works = [Work(asked.request_id, item, bucket=bucket) for item in items]
        works[-1].last = not asked.open
        return asked, works

    def feed(self, state: Request, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """A piece that the client appended, as a request of its own, or the end of the input. `state`: the request."""
        piece = payload["piece"]
        if piece is None:
            return [Work(state.request_id, None, last=final)]
        item = msgspec.structs.replace(
            state,
            messages=[Message("user", list(piece.tensors))] if piece.tensors else [],
            prompt=piece.prompt,
            prompt_token_ids=piece.prompt_token_ids,
            prompt_embeds=None,
            add_special_tokens=False,
            reply=piece.reply,
        )
        works = [Work(state.request_id, _Appended(one)) for one in self.pieces(item, appended=True)]
        works[-1].last = final
        return works

    def end(self, state: Any) -> None:
        """Nothing to free."""

    def run(self, works: list[Work]) -> list[Result]:
        """Requests → payloads, or an error for each invalid request. Payloads of open requests say what follows the
        input (`THEN`: a value of the autoregressive engine's `Then`); that of the end has nothing else."""
        return [self.result(work.item) for work in works]

    def result(self, item: Request | _Appended | None) -> Result:
        """The result of one item."""
        if item is None:
            return Result({THEN: "end"})
        request, process = (
            (item.request, self.process_appended) if isinstance(item, _Appended) else (item, self.process)
        )
        if self.budget is not None:
            self.budget.begin()
        try:
            if not self.takes_embeds and (found := request.embedded()):
                field = found[0].field
                raise InvalidRequest(
                    f"{field} is prompt_embeds; this model takes its prompt in other forms", field=field
                )
            if request.earlier and not self.goes_on:
                raise InvalidRequest("previous is set, but this model does not go on from it", field="previous")
            payload = process(request)
        except SegueError as error:
            return Result(error=error)
        if request.open:
            payload[THEN] = "turn" if request.reply else "hold"
        return Result(payload)
