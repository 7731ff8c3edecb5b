"""The LoRA adapters that the workers of a stage should have: kept here, so that one that comes back gets them again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from itertools import count

from segue.graph.deployment import Plan
from segue.messages.errors import InvalidRequest, NotFound, SegueError, StageLost, error_from, nearest
from segue.messages.wire import AdapterLoaded, LoadAdapter, ToWorker, UnloadAdapter
from segue.orchestrator.replicas import Replica, Replicas

log = logging.getLogger(__name__)

NOBODY = 0
"""The ticket of what nobody waits for."""


class Adapters:
    """By name: the directory. A worker loads those of the deployment before it is ready, the others by message."""

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
        """By ticket: the worker, and how it went."""

    async def load(self, name: str, directory: str) -> str:
        """Return when every worker of the stage that is ready has it: the directory, as an absolute path.

        Raises `InvalidRequest`, or `StageLost` where there is no worker or one dies over it; then none has it.
        """
        if self.stage is None:
            raise InvalidRequest("no stage of this deployment takes LoRA adapters (its key lora)", field="lora_name")
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
        """Let no further request use it; those that run go on with it. Raises `NotFound` naming the nearest."""
        if name not in self._wanted:
            raise NotFound(f"there is no LoRA adapter {name!r}{nearest(name, self._wanted)}", field="lora_name")
        del self._wanted[name]
        assert self.stage is not None
        for replica in self._ready():
            self._send(replica.address, UnloadAdapter(self.stage, name))

    def ready(self, replica: Replica) -> None:
        """A worker has those of the deployment: tell it of what is different by now."""
        if self.stage is None or self.stage not in replica.group:
            return
        for name, directory in self._at_start.items():
            if self._wanted.get(name) != directory:
                self._send(replica.address, UnloadAdapter(self.stage, name))
        for name, directory in self._wanted.items():
            if self._at_start.get(name) != directory:
                self._send(replica.address, LoadAdapter(NOBODY, self.stage, name, directory))

    def heard(self, message: AdapterLoaded) -> None:
        """How loading went in one worker."""
        error = error_from(message.kind, message.message, field="lora_path") if message.kind else None
        if message.ticket in self._waiting:
            self._settle(message.ticket, error)
        elif error is not None:
            log.error("worker %s could not load an adapter again: %s", message.worker, error)

    def lost(self, worker: str) -> None:
        """A worker died: it will not answer."""
        for ticket, (name, _) in list(self._waiting.items()):
            if name == worker:
                self._settle(ticket, StageLost("a worker died while it loaded the adapter", stage=self.stage))

    def close(self, error: SegueError) -> None:
        """No worker will answer any more."""
        for ticket in list(self._waiting):
            self._settle(ticket, error)

    def _settle(self, ticket: int, error: SegueError | None) -> None:
        _, future = self._waiting.pop(ticket)
        if not future.done():
            future.set_result(error)

    def _ready(self) -> list[Replica]:
        return [one for one in self._replicas.all if self.stage in one.group and one.state == "ready"]
