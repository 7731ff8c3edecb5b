"""The LoRA adapters that the workers of a stage should have, kept so that a restarted worker gets them again.

Optional reading: only for adapters that come and go while a server runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from itertools import count

from segue.graph.deployment.deployment import Plan
from segue.messages.errors import InvalidRequest, NotFound, SegueError, StageLost, error_from, nearest
from segue.messages.wire import AdapterLoaded, LoadAdapter, ToWorker, UnloadAdapter
from segue.orchestrator.workers.replicas import Replica, Replicas

log = logging.getLogger(__name__)

NOBODY = 0
"""The ticket of a load that nobody waits for."""


class Adapters:
    """Name → directory. A worker loads the deployment's adapters before it is ready, the others on a message."""

    def __init__(self, plan: Plan, replicas: Replicas, send: Callable[[str, ToWorker], None]) -> None:
        self._replicas = replicas
        self._send = send
        stages = {name: stage.lora for name, stage in plan.stages.items() if stage.lora is not None}
        self.stage = next(iter(stages), None)
        """The stage that takes adapters."""
        self._at_start: dict[str, str] = dict(stages[self.stage].adapters) if self.stage is not None else {}
        self._wanted = dict(self._at_start)
        self._tickets = count(NOBODY + 1)
        self._waiting: dict[int, tuple[str, asyncio.Future[SegueError | None]]] = {}
        """Ticket → the worker, and the future of its result."""

    async def load(self, name: str, directory: str) -> str:
        """Load an adapter in every ready worker of the stage; return its directory as an absolute path.

        Raises `InvalidRequest`, or `StageLost` if there is no worker or one dies meanwhile; then none keeps it.
        """
        if self.stage is None:
            raise InvalidRequest("no stage of the deployment takes LoRA adapters (set its key lora)", field="lora_name")
        if name in self._wanted:
            raise InvalidRequest(f"there is an adapter {name!r} already; unload it first", field="lora_name")
        directory = os.path.abspath(os.path.expanduser(directory))
        workers = self._ready()
        if not workers:
            raise StageLost(f"stage {self.stage!r} has no ready worker now; try again later", stage=self.stage)
        self._wanted[name] = directory
        try:
            loop = asyncio.get_running_loop()
            futures = []
            for replica in workers:
                ticket, future = next(self._tickets), loop.create_future()
                self._waiting[ticket] = replica.worker, future
                futures.append(future)
                self._send(replica.address, LoadAdapter(ticket, self.stage, name, directory))
            errors = [error for error in await asyncio.gather(*futures) if error is not None]
            if errors:
                raise errors[0]
        except BaseException:
            self.unload(name)
            raise
        return directory

    def unload(self, name: str) -> None:
        """Unload an adapter: running requests keep it, new ones cannot use it. Raises `NotFound` naming the nearest."""
        if name not in self._wanted:
            raise NotFound(f"there is no LoRA adapter {name!r}{nearest(name, self._wanted)}", field="lora_name")
        del self._wanted[name]
        assert self.stage is not None
        for replica in self._ready():
            self._send(replica.address, UnloadAdapter(self.stage, name))

    def ready(self, replica: Replica) -> None:
        """Tell a new worker, which has the deployment's adapters, of all later changes."""
        if self.stage is None or self.stage not in replica.group:
            return
        for name, directory in self._at_start.items():
            if self._wanted.get(name) != directory:
                self._send(replica.address, UnloadAdapter(self.stage, name))
        for name, directory in self._wanted.items():
            if self._at_start.get(name) != directory:
                self._send(replica.address, LoadAdapter(NOBODY, self.stage, name, directory))

    def loaded(self, message: AdapterLoaded) -> None:
        """Handle a worker's result of loading an adapter."""
        error = error_from(message.kind, message.message, field="lora_path") if message.kind else None
        if message.ticket in self._waiting:
            self._settle(message.ticket, error)
        elif error is not None:
            log.error("worker %s could not load an adapter again: %s", message.worker, error)

    def lost(self, worker: str) -> None:
        """Fail the loads of a worker that died."""
        for ticket, (name, _) in list(self._waiting.items()):
            if name == worker:
                self._settle(ticket, StageLost("a worker died while it loaded the adapter", stage=self.stage))

    def close(self, error: SegueError) -> None:
        """Fail all loads: no worker will answer any more."""
        for ticket in list(self._waiting):
            self._settle(ticket, error)

    def _settle(self, ticket: int, error: SegueError | None) -> None:
        _, future = self._waiting.pop(ticket)
        if not future.done():
            future.set_result(error)

    def _ready(self) -> list[Replica]:
        return [one for one in self._replicas.all if self.stage in one.group and one.state == "ready"]
