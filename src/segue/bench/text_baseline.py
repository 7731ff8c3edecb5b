"""The `transformers` baselines of `segue bench text`: one process, served in several ways."""

from __future__ import annotations

import time
from collections.abc import Mapping

from segue.bench.child import ChildDriver, ChildProcess
from segue.bench.text_wire import Answer, Loaded, Options, Policy
from segue.bench.text_workload import TextOutcome, TextRequest

GATHER_SECONDS = 0.05


NAMES = {
    "one": "transformers one at a time",
    "static": "transformers static batches",
    "continuous": "transformers generate_batch",
}


class ReferenceProcess(ChildProcess[TextRequest, Loaded, Answer]):
    """`segue.bench.text_reference`."""

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        super().__init__("transformers", "segue.bench.text_reference", options, Loaded, Answer, environment)


class ReferenceDriver(ChildDriver[ReferenceProcess]):
    """One way of serving with the process."""

    def __init__(self, way: str, process: ReferenceProcess) -> None:
        """`way`: of `NAMES`."""
        super().__init__(NAMES[way], process)
        self._way = way

    async def take_over(self, together: int) -> None:
        """From now on the process serves like this; a batch is as large as there are clients."""
        most = 1 if self._way == "one" else together
        await self.process.send(Policy(self._way, most, GATHER_SECONDS if most > 1 else 0.0))

    async def run(self, request: TextRequest) -> TextOutcome:
        sent = time.monotonic()
        answer = await self.process.ask(request)
        return TextOutcome(
            index=request.index,
            prompt_tokens=len(request.prompt),
            # what a server around it could have sent on: it is not held against the library that none is
            times=[at - sent for at in answer.times],
            jct=time.monotonic() - sent,
            token_ids=answer.token_ids,
        )
