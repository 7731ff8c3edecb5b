"""The sides of `segue bench diffusion`: Segue, and one process of `diffusers` served in two ways."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from segue.bench.async_omni import AsyncOmniDriver
from segue.bench.child import ChildDriver, ChildProcess
from segue.bench.diffusion_reference import TRUE_CFG, guided
from segue.bench.diffusion_wire import Answer, Loaded, Options, Policy
from segue.bench.diffusion_workload import PictureOutcome, PictureRequest
from segue.bench.load import LoadDriver
from segue.bench.profile import snapshot
from segue.messages.deltas import Finished, ImageDelta
from segue.messages.diffusion import DiffusionParams
from segue.messages.request import Request

GATHER_SECONDS = 0.05
SEGUE, ONE, BATCH = "segue", "diffusers one at a time", "diffusers lists of prompts"

_DENOISING = ("denoiser", "step_seconds")

PictureDriver = LoadDriver[PictureRequest, PictureOutcome]


class SegueDriver(AsyncOmniDriver):
    """Drives a running pipeline."""

    def __init__(
        self, model_dir: Path, pipeline: str, dtype: str, config: Mapping[str, Any], name: str = SEGUE
    ) -> None:
        """`pipeline`: the class that `model_index.json` names."""
        super().__init__(name, model_dir, dtype=dtype, config=config)
        self.model_dir = model_dir
        self._made = (model_dir, pipeline, dtype, config)
        self.true_cfg = TRUE_CFG in guided(pipeline, 1.0)
        """Whether guidance is `true_cfg_scale`; else it is `guidance_scale`."""
        self.previews = 0
        """Asked for with every request from now on."""

    def with_denoiser(self, name: str, keys: Mapping[str, Any]) -> SegueDriver:
        """Another one, whose denoiser is deployed with these keys."""
        model_dir, pipeline, dtype, config = self._made
        stages = dict(config.get("stages", {}))
        stages["denoiser"] = {**stages.get("denoiser", {}), **keys}
        return SegueDriver(model_dir, pipeline, dtype, {**config, "stages": stages}, name=f"{SEGUE}, {name}")

    def denoising(self) -> float:
        """Seconds of the denoiser's steps so far; it tells of them when it falls idle."""
        steps = snapshot(self.stats()).get(_DENOISING)
        return 0.0 if steps is None else steps.sum

    async def run(self, request: PictureRequest) -> PictureOutcome:
        return await self.make(self.asked(request), request)

    async def make(self, asked: Request, request: PictureRequest) -> PictureOutcome:
        """The outcome of `asked`, which is what the benchmark's `request` became."""
        sent = time.monotonic()
        preview, picture = None, b""
        async with aclosing(self._omni.stream(asked)) as deltas:
            async for delta in deltas:
                if isinstance(delta, ImageDelta):
                    preview = preview or time.monotonic() - sent
                    picture = delta.data if delta.partial is None else b""
                elif isinstance(delta, Finished):
                    jct = time.monotonic() - sent
                    assert preview is not None, "a request of a picture ends with one"
                    return PictureOutcome(
                        index=request.index, steps=request.steps, jct=jct, first_preview=preview, picture=picture
                    )
        raise AssertionError("a stream ends with Finished or an error")

    def asked(self, request: PictureRequest) -> Request:
        """What Segue is asked."""
        return Request(
            request_id=uuid.uuid4().hex,
            prompt=request.prompt,
            modalities=["image"],
            seed=request.seed,
            diffusion=DiffusionParams(
                negative_prompt=request.negative_prompt,
                height=request.size,
                width=request.size,
                num_inference_steps=request.steps,
                partial_images=self.previews,
                true_cfg_scale=request.guidance if self.true_cfg else None,
                guidance_scale=None if self.true_cfg else request.guidance,
            ),
        )


class ChangedDriver:
    """The same Segue, its requests changed."""

    def __init__(self, name: str, segue: SegueDriver, **changes: Any) -> None:
        """`changes`: fields of `DiffusionParams`."""
        self.name = f"{SEGUE}, {name}"
        self._segue = segue
        self._changes = changes

    @property
    def startup(self) -> float:
        return self._segue.startup

    async def start(self) -> None:
        """Nothing to do: it is Segue's own."""

    async def take_over(self, together: int) -> None:
        """As for Segue."""

    async def hand_over(self) -> None:
        """As for Segue."""

    async def stop(self) -> None:
        """Nothing to do: it is Segue's own."""

    async def run(self, request: PictureRequest) -> PictureOutcome:
        return await self._segue.make(changed(self._segue.asked(request), **self._changes), request)


def changed(asked: Request, **changes: Any) -> Request:
    """With other fields of its `DiffusionParams`."""
    assert asked.diffusion is not None
    return msgspec.structs.replace(asked, diffusion=msgspec.structs.replace(asked.diffusion, **changes))


def cached(segue: SegueDriver, step_cache: str, threshold: float | None) -> ChangedDriver:
    """The same Segue with a step cache."""
    name = step_cache + ("" if threshold is None else f" {threshold:g}")
    return ChangedDriver(name, segue, step_cache=step_cache, step_cache_threshold=threshold)


class ReferenceProcess(ChildProcess[PictureRequest, Loaded, Answer]):
    """`segue.bench.diffusion_reference`."""

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        super().__init__("diffusers", "segue.bench.diffusion_reference", options, Loaded, Answer, environment)


class ReferenceDriver(ChildDriver[ReferenceProcess]):
    """One way of serving with the process; its name is `ONE` or `BATCH`."""

    async def take_over(self, together: int) -> None:
        """From now on the process serves like this; a list is as long as there are clients."""
        most = together if self.name == BATCH else 1
        await self.process.send(Policy(most, GATHER_SECONDS if most > 1 else 0.0))

    async def run(self, request: PictureRequest) -> PictureOutcome:
        sent = time.monotonic()
        answer = await self.process.ask(request)
        jct = time.monotonic() - sent
        return PictureOutcome(
            index=request.index,
            steps=request.steps,
            jct=jct,
            first_preview=jct,
            picture=answer.picture,
            network=answer.network,
        )
