"""A denoiser without a model: what it makes of a request depends on nothing but the request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from segue.engines.contract import Engine, Payload, StageOutput, StageRequest
from segue.engines.diffusion.contract import Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    calls: int = 3
    tokens: int = 4
    guided: bool = False
    outputs: int = 1
    priority: int = 0
    partial_images: int = 0
    size: tuple[int | None, int | None] = (None, None)
    """Height and width."""
    frames: int | None = None
    given: int = 0
    """Of `tokens`, those of images that it brings."""

    def request(self) -> StageRequest:
        height, width = self.size
        params = DiffusionParams(
            num_images_per_prompt=self.outputs,
            partial_images=self.partial_images,
            height=height,
            width=width,
            num_frames=self.frames,
        )
        return StageRequest(
            request_id=self.name,
            stage="denoiser",
            request=Request(request_id=self.name, prompt="", diffusion=params),
            sampling=FALLBACK,
            seed=0,
            upstreams=frozenset({"input"}),
            downstreams=frozenset({"decoder"}),
            to_client=frozenset(),
            priority=self.priority,
        )


class Steps:
    """A scheduler with a memory, as those of several steps have."""

    order = 1

    def __init__(self, calls: int) -> None:
        self.timesteps = torch.arange(calls, 0, -1).double()
        self._last: torch.Tensor | None = None

    def step(self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **others: Any) -> Any:
        last = model_output if self._last is None else self._last
        self._last = model_output
        return (sample - 0.1 * model_output - 0.05 * last + 0.01 * timestep,)


@dataclass
class FakeDenoiser:
    """`DiffusionModel`. `calls`: the rows of each call, by request and output."""

    weight_bytes: int = 0
    bytes_per_token: int = 0
    fails: Callable[[Sequence[Row]], Exception | None] = lambda rows: None
    calls: list[list[tuple[str, int]]] = field(default_factory=list)
    made_up: tuple[int, ...] = ()
    asks: dict[str, Ask] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def warm_up(self) -> None:
        self.calls.clear()

    def trials(self) -> Iterator[Sample]:
        for tokens in self.made_up:
            yield self.sample(Ask("trial", tokens=tokens), 0)

    def row_bytes(self, sample: Sample) -> int:
        return self.bytes_per_token * sample.tokens

    def begin(self, request: StageRequest) -> Any:
        return request

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Sample]:
        if payload.get("wrong"):
            raise InvalidRequest("this one is wrong", field="prompt")
        ask = self.asks[state.request_id]
        return [self.sample(ask, index) for index in range(ask.outputs)] if final else []

    def sample(self, ask: Ask, index: int) -> Sample:
        seed = sum(map(ord, ask.name)) + 1000 * index
        latents = torch.randn(1, ask.tokens, generator=torch.Generator().manual_seed(seed)).double()
        scheduler = Steps(ask.calls)
        return Sample(
            ask.name,
            index,
            latents,
            scheduler,
            list(scheduler.timesteps),
            tokens=ask.tokens,
            bucket=ask.tokens,
            conditions=[float(seed), 1.0] if ask.guided else [float(seed)],
            params=ask.request().request.diffusion or DiffusionParams(),
            given=ask.given,
        )

    def branches(self, sample: Sample) -> Sequence[int]:
        return range(len(sample.conditions))

    def bucket(self, sample: Sample) -> Hashable:
        return sample.bucket

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        return nullcontext()

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        assert len({row.sample.bucket for row in rows}) == 1, "other shapes in one call"
        if (error := self.fails(rows)) is not None:
            raise error
        self.calls.append([(row.sample.request_id, row.sample.index) for row in rows])
        latents = torch.cat([row.sample.latents for row in rows])
        conditions = torch.tensor([row.condition for row in rows], dtype=torch.float64)[:, None]
        return (latents.tanh() + conditions / 1000).split(1)

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        return predictions[0] if len(predictions) == 1 else predictions[1] + 3 * (predictions[0] - predictions[1])

    def finish(self, sample: Sample) -> Payload:
        return {"latents": sample.latents, "index": sample.index}

    def preview(self, sample: Sample, prediction: torch.Tensor) -> Payload:
        return {"latents": sample.latents - prediction, "index": sample.index}

    def end(self, state: Any) -> None:
        self.ended.append(state.request_id)


def truth(ask: Ask, index: int) -> torch.Tensor:
    """The latents of one output, computed alone."""
    fake = FakeDenoiser()
    sample = fake.sample(ask, index)
    while sample.remaining:
        rows = [Row(sample, branch) for branch in fake.branches(sample)]
        prediction = fake.combine(sample, [fake.predict([row])[0] for row in rows])
        [sample.latents] = sample.scheduler.step(prediction, sample.timestep, sample.latents)
        sample.step += 1
    return sample.latents


def made(engine: Engine, *asks: Ask) -> list[StageOutput]:
    """All that comes of these requests."""
    for ask in asks:
        engine.add(ask.request())
        engine.feed(ask.name, "input", {}, final=True)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs
