"""The loop's stages. What a visit draws and sees depends on all rows of that visit, so a lost one shows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue_toy.stages import VOCAB, Counter, Input, Tone, ids_forward, rows_forward, stop_point


def value_of(ids: list[int]) -> int:
    """What is drawn after a visit that computed these tokens."""
    value = 7
    for token in ids:
        value = (31 * value + token) % 251
    return value


def seen(value: int) -> list[int]:
    """The tokens that an image of this value is seen as."""
    return [1 + (value * factor) % (VOCAB - 1) for factor in (1, 3, 5)]


class _Stage(ABC):
    """Takes one payload, or rows until they end, and makes one result."""

    name = ""

    def __init__(self, ctx: LoadContext) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def begin(self, request: StageRequest) -> tuple[Any, list[Work]]:
        return {"request": request, "rows": []}, []

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        state["rows"] += [payload] if payload else []
        return [Work(state["request"].request_id, state, last=True)] if final else []

    def run(self, works: list[Work]) -> list[Result]:
        for work in works:
            stop_point(work.item["request"], self.name, work.item["request"].visit)
        return [Result(self.make(work.item["rows"])) for work in works]

    @abstractmethod
    def make(self, rows: list[Payload]) -> Payload:
        """The result of all rows."""

    def end(self, state: Any) -> None:
        pass


class Draw(_Stage):
    name = "draw"

    def make(self, rows: list[Payload]) -> Payload:
        at = {int(row["start"]) + place: int(one) for row in rows for place, one in enumerate(row["rows"][:, 0])}
        assert sorted(at) == list(range(min(at), max(at) + 1)), "a row is missing"
        return {"value": value_of([at[place] for place in sorted(at)])}


class Show(_Stage):
    name = "show"

    def make(self, rows: list[Payload]) -> Payload:
        return {"image": torch.full((2, 2, 3), rows[0]["value"], dtype=torch.uint8)}


class See(_Stage):
    name = "see"

    def make(self, rows: list[Payload]) -> Payload:
        return {"token_ids": torch.tensor(seen(rows[0]["value"]))}


class Polish(_Stage):
    """Text, or what was judged, to a smaller value."""

    name = "polish"

    def make(self, rows: list[Payload]) -> Payload:
        [given] = rows
        value = value_of(given["token_ids"].tolist()) if "token_ids" in given else given["value"]
        return {"value": value // 2}


class Judge(_Stage):
    name = "judge"

    def make(self, rows: list[Payload]) -> Payload:
        return {"value": rows[0]["value"]}


class LoopTone(Tone):
    """As `Tone`; the rows of a later visit begin where those of the visit before ended."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        state["have"] = state["have"] or int(payload.get("start", 0))
        return super().feed(state, upstream, payload, final=final)


STAGE_MODELS = {"input": Input, "writer": Counter, "draw": Draw, "show": Show, "see": See}
STAGE_MODELS |= {"tone": LoopTone, "polish": Polish, "judge": Judge}
TRANSFERS = {
    ("input", "writer"): ids_forward,
    ("writer", "draw"): rows_forward,
    ("draw", "show"): ids_forward,
    ("draw", "see"): ids_forward,
    ("see", "writer"): ids_forward,
    ("writer", "tone"): rows_forward,
    ("input", "polish"): ids_forward,
    ("polish", "show"): ids_forward,
    ("polish", "judge"): ids_forward,
    ("judge", "polish"): ids_forward,
}
