"""The stages: the input counts frames, the film draws them, some in each call."""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload, StageOutput, StageRequest
from segue.engines.module.contract import Result, Work

SIDE, FPS, AT_ONCE = 128, 8, 8


class Input:
    """The number of frames."""

    def __init__(self, ctx: LoadContext) -> None:
        ctx.progress(1.0, "nothing to load")

    def warm_up(self) -> None:
        pass

    def begin(self, request: StageRequest) -> tuple[None, list[Work]]:
        params = request.request.diffusion
        frames = params.num_frames if params is not None else None
        return None, [Work(request.request_id, {"frames": frames or AT_ONCE}, last=True)]

    def feed(self, state: None, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        raise AssertionError("the input stage has no upstream")

    def run(self, works: list[Work]) -> list[Result]:
        return [Result(work.item) for work in works]

    def end(self, state: None) -> None:
        pass


class Film:
    """Frames of noise from the request's seed."""

    def __init__(self, ctx: LoadContext) -> None:
        ctx.progress(1.0, "nothing to load")

    def warm_up(self) -> None:
        pass

    def begin(self, request: StageRequest) -> tuple[Any, list[Work]]:
        return (request.request_id, torch.Generator().manual_seed(request.seed)), []

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        request_id, generator = state
        frames = payload["frames"]
        firsts = range(0, frames, AT_ONCE)
        counts = [(first, min(AT_ONCE, frames - first)) for first in firsts]
        return [Work(request_id, (generator, *one), last=one[0] == firsts[-1]) for one in counts]

    def run(self, works: list[Work]) -> list[Result]:
        return [Result(self._draw(*work.item)) for work in works]

    def end(self, state: Any) -> None:
        pass

    @staticmethod
    def _draw(generator: torch.Generator, first: int, count: int) -> Payload:
        video = torch.randint(0, 256, (count, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
        return {"video": video, "fps": float(FPS), "index": 0, "first": first}


def forward(request: StageRequest, output: StageOutput) -> Payload | None:
    return output.payload


STAGE_MODELS = {"input": Input, "film": Film}
TRANSFERS = {("input", "film"): forward}
