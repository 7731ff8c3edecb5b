"""The stage model that turns codes into frames while they are drawn: a module stage after an autoregressive one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import StageFailed
from segue.models.shared.diffusion.vae import levels


@dataclass(slots=True)
class _State:
    """A request at this stage."""

    request_id: str
    kinds: list[str]
    """What the client receives: `video`, `image`, or both."""
    have: int = 0
    """Codes received so far."""
    codes: list[int] = field(default_factory=list)
    """Those of the frame that is not complete."""
    frames: int = 0


class CodesToFrames(ABC):
    """`ModuleModel`: `{"codes": [n], "start"}` per chunk in (`codes_of_turn`); each frame out, as soon as it is
    complete, as a frame of the request's video and as an image. Frames of several requests share a call."""

    codes_per_frame: int
    fps: float = 8.0

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.network = self.load(ctx)

    @abstractmethod
    def load(self, ctx: LoadContext) -> Any:
        """The network, on `ctx.device` in `ctx.dtype`; sets `codes_per_frame`."""

    @abstractmethod
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """[n, codes_per_frame] long → [n, 3, height, width] in [-1, 1]."""

    def warm_up(self) -> None:
        """Decode one frame."""
        self._pixels(torch.zeros(1, self.codes_per_frame, dtype=torch.long))

    def begin(self, request: StageRequest) -> tuple[_State, list[Work]]:
        return _State(request.request_id, sorted(request.to_client | request.encoded)), []

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Take codes; those that are known already, from an earlier attempt, are skipped."""
        works = []
        if payload:
            new = payload["codes"][max(0, state.have - payload["start"]) :].tolist()
            state.have += len(new)
            state.codes += new
        while len(state.codes) >= self.codes_per_frame:
            frame = state.codes[: self.codes_per_frame]
            del state.codes[: self.codes_per_frame]
            works += [
                Work(state.request_id, (kind, state.frames, frame), "frame", ordered=False) for kind in state.kinds
            ]
            state.frames += 1
        if final and state.codes:
            raise StageFailed(f"the last frame has {len(state.codes)} of {self.codes_per_frame} codes")
        if final and not works:
            works.append(Work(state.request_id, None, "end"))
        if final:
            works[-1].last = True
        return works

    def run(self, works: list[Work]) -> list[Result]:
        if works[0].item is None:
            return [Result() for _ in works]
        pixels = self._pixels(torch.tensor([work.item[2] for work in works]))
        return [_shown(self.fps, work.item, frame) for work, frame in zip(works, pixels, strict=True)]

    @torch.inference_mode()
    def _pixels(self, codes: torch.Tensor) -> torch.Tensor:
        """[n, codes] → [n, height, width, 3] float32 in [0, 1]."""
        decoded = self.decode(codes.to(self.device)).float()
        return (decoded / 2 + 0.5).clamp(0, 1).movedim(1, -1)

    def end(self, state: _State) -> None:
        """Nothing to free."""


def _shown(fps: float, item: tuple[str, int, list[int]], pixels: torch.Tensor) -> Result:
    """A frame as the client's payload. NaN fails its request alone."""
    kind, index, _ = item
    try:
        frame = levels(pixels, index)
    except StageFailed as error:
        return Result(error=error)
    if kind == "image":
        return Result({"image": frame, "index": index})
    return Result({"video": frame[None], "fps": fps, "first": index})
