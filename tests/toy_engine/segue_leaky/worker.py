from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from segue.engines.contract import Engine, LoadContext, Payload, StageOutput, StageRequest
from segue.graph.kinds.kind import extended
from segue.worker.kinds.kind import Host, WorkerKind
from segue_leaky.kind import LeakyPlan


@dataclass(slots=True)
class LeakyContext(LoadContext):
    decay: float = 1.0


class LeakyModel(Protocol):
    def add(self, total: float, number: float) -> float: ...


@dataclass(slots=True)
class _Entry:
    left: list[float] = field(default_factory=list)
    complete: bool = False
    total: float = 0.0


class LeakyEngine:
    """`Engine` over a `LeakyModel`: one step adds one number of each of at most `max_batch` requests."""

    def __init__(self, model: LeakyModel, max_batch: int) -> None:
        self._model = model
        self._max_batch = max_batch
        self._entries: dict[str, _Entry] = {}
        self._paused: set[str] = set()

    def warm_up(self) -> None:
        self._model.add(0.0, 0.0)

    def add(self, request: StageRequest) -> None:
        self._entries[request.request_id] = _Entry()

    def feed(self, request_id: str, upstream: str, payload: Payload, *, final: bool) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.left += payload["token_ids"].tolist() if "token_ids" in payload else []
            entry.complete = final

    def cancel(self, request_id: str) -> None:
        self._entries.pop(request_id, None)
        self._paused.discard(request_id)

    def pause(self, request_id: str) -> None:
        self._paused.add(request_id)

    def resume(self, request_id: str) -> None:
        self._paused.discard(request_id)

    def backlog(self, request_id: str) -> int:
        return 0

    def has_work(self) -> bool:
        return bool(self._ready())

    def step(self) -> list[StageOutput]:
        outputs = []
        for name in self._ready():
            entry = self._entries[name]
            if entry.left:
                entry.total = self._model.add(entry.total, entry.left.pop(0))
            if entry.complete and not entry.left:
                outputs.append(StageOutput(name, payload={"embedding": torch.tensor([entry.total])}, finished=True))
                self.cancel(name)
        return outputs

    def stats(self) -> dict[str, float]:
        return {"waiting": 0.0, "running": float(len(self._entries)), "batch": 0.0}

    def _ready(self) -> list[str]:
        ready = [name for name, entry in self._entries.items() if entry.left or entry.complete]
        return [name for name in ready if name not in self._paused][: self._max_batch]


def _context(base: LoadContext, plan: LeakyPlan) -> LeakyContext:
    return extended(LeakyContext, base, decay=plan.decay)


def _build(plan: LeakyPlan, model: Any, context: LeakyContext, host: Host) -> Engine:
    return LeakyEngine(model, plan.max_batch)


KIND = WorkerKind(contract=LeakyModel, context=_context, build=_build)
