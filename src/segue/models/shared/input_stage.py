"""The base class of input stages."""

from __future__ import annotations

from abc import ABC, abstractmethod

from segue.engines.contract import Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.media.limits import DecodeBudget
from segue.messages.errors import InvalidRequest, SegueError
from segue.messages.request import Request


class InputStage(ABC):
    """`ModuleModel` that works on the request itself: one item per request."""

    budget: DecodeBudget | None = None
    """Decoding budget for the media of each request, if the model takes media."""
    takes_embeds = False
    """Whether parts of messages may be embeddings (`TextPart.embeds`)."""

    @abstractmethod
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""

    def warm_up(self) -> None:
        """Process one short text, unless the stage accepts none (no tokenizer)."""
        self._result(Request(request_id="warm-up", prompt="Good morning!"))

    def begin(self, request: StageRequest) -> tuple[None, list[Work]]:
        """One work item: the request is complete."""
        return None, [Work(request.request_id, request.request, last=True)]

    def feed(self, state: None, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Never called with data: no stage precedes the input stage."""
        return []

    def end(self, state: None) -> None:
        """Nothing to free: no state is kept per request."""

    def run(self, works: list[Work]) -> list[Result]:
        """Requests → payloads, or an error for each invalid request."""
        return [self._result(work.item) for work in works]

    def _result(self, request: Request) -> Result:
        if self.budget is not None:
            self.budget.begin()
        try:
            self._check_embeds(request)
            return Result(self.process(request))
        except SegueError as error:
            return Result(error=error)

    def _check_embeds(self, request: Request) -> None:
        if not self.takes_embeds and (found := request.embedded()):
            field = found[0].field
            raise InvalidRequest(f"{field} is prompt_embeds; this model takes its prompt in other forms", field=field)
