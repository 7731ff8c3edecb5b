"""The `transformers` baselines of `segue bench text`: one process that serves in several ways, and its messages in
addition to those of `segue.bench.harness.channel`."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from segue.bench.harness.child import ChildDriver, ChildProcess
from segue.bench.text.workload import TextOutcome, TextRequest


class Options(msgspec.Struct, kw_only=True):
    """Options for loading the model; the process receives them as JSON in `argv`."""

    model_dir: str
    dtype: str
    threads: int


class Policy(msgspec.Struct, tag=True):
    """Sets the way of serving from now on."""

    way: str
    """`one`: one at a time; `static`: `generate` on padded batches; `continuous`: `generate_batch`."""
    most: int
    """Maximum requests per call."""
    gather: float
    """Seconds to wait for a batch to fill after its first request."""


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer; times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    token_ids: list[int]
    times: list[float]
    """Time of each token in the process."""


GATHER_SECONDS = 0.05


NAMES = {
    "one": "transformers one at a time",
    "static": "transformers static batches",
    "continuous": "transformers generate_batch",
}


class ReferenceProcess(ChildProcess[TextRequest, Loaded, Answer]):
    """A process of `segue.bench.text.reference`."""

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        super().__init__("transformers", "segue.bench.text.reference", options, Loaded, Answer, environment)


class ReferenceDriver(ChildDriver[ReferenceProcess]):
    """One way of serving with the process."""

    def __init__(self, way: str, process: ReferenceProcess) -> None:
        """`way`: a key of `NAMES`."""
        super().__init__(NAMES[way], process)
        self._way = way

    async def take_over(self, together: int) -> None:
        """Set the process's way of serving; a batch is as large as the number of clients."""
        most = 1 if self._way == "one" else together
        await self.process.send(Policy(self._way, most, GATHER_SECONDS if most > 1 else 0.0))

    async def run(self, request: TextRequest) -> TextOutcome:
        sent = time.monotonic()
        answer = await self.process.ask(request)
        return TextOutcome(
            index=request.index,
            prompt_tokens=len(request.prompt),
            # when a server could have sent each token: the library is not penalised for having none
            times=[at - sent for at in answer.times],
            jct=time.monotonic() - sent,
            token_ids=answer.token_ids,
        )
