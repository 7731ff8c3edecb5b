"""What input stages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from segue.engines.contract import Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import InvalidRequest, SegueError
from segue.messages.request import Request


class InputStage(ABC):
    """`ModuleAdapter` that works on the request itself: one item per request."""

    takes_embeds = False
    """Parts of messages may be embeddings (`TextPart.embeds`)."""

    @abstractmethod
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` naming the field, the value and what would be right."""

    def warm_up(self) -> None:
        """One short text; where it cannot be taken (no tokenizer), there is nothing to warm up."""
        self._result(Request(request_id="warm-up", prompt="Good morning!"))

    def begin(self, request: StageRequest) -> tuple[None, list[Work]]:
        """All of it is there."""
        return None, [Work(request.request_id, request.request, last=True)]

    def feed(self, state: None, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Nothing is upstream of the input stage."""
        return []

    def end(self, state: None) -> None:
        """Nothing is kept per request."""

    def run(self, works: list[Work]) -> list[Result]:
        """Requests → payloads, or the error of each that is wrong."""
        return [self._result(work.item) for work in works]

    def _result(self, request: Request) -> Result:
        try:
            self._check_embeds(request)
            return Result(self.process(request))
        except SegueError as error:
            return Result(error=error)

    def _check_embeds(self, request: Request) -> None:
        if not self.takes_embeds and (found := request.embedded()):
            field = found[0].field
            raise InvalidRequest(f"{field} is prompt_embeds; this model takes its prompt in other forms", field=field)
