"""The sides of `segue bench diffusion`: Segue, and one process of `diffusers` that serves in two ways."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from segue.bench.diffusion.reference import TRUE_CFG, guided
from segue.bench.diffusion.wire import Answer, Loaded, Options, Policy
from segue.bench.diffusion.workload import ImageOutcome, ImageRequest
from segue.bench.harness.async_omni import AsyncOmniDriver
from segue.bench.harness.child import ChildDriver, ChildProcess
from segue.bench.harness.load import LoadDriver
from segue.bench.omni.profile import snapshot
from segue.messages.deltas import Finished, ImageDelta
from segue.messages.diffusion import DiffusionParams
from segue.messages.request import Request

GATHER_SECONDS = 0.05
SEGUE, ONE, BATCH = "segue", "diffusers one at a time", "diffusers lists of prompts"

_DENOISING = ("denoiser", "step_seconds")

ImageDriver = LoadDriver[ImageRequest, ImageOutcome]


class SegueDriver(AsyncOmniDriver):
    """Sends requests to a running Segue."""

    def __init__(
        self, model_dir: Path, pipeline: str, dtype: str, config: Mapping[str, Any], name: str = SEGUE
    ) -> None:
        """`pipeline`: the class that `model_index.json` names."""
        super().__init__(name, model_dir, dtype=dtype, config=config)
        self.model_dir = model_dir
        self._made = (model_dir, pipeline, dtype, config)
        self.true_cfg = TRUE_CFG in guided(pipeline, 1.0)
        """Whether the guidance parameter is `true_cfg_scale`; else it is `guidance_scale`."""
        self.previews = 0
        """Number of previews that every further request asks for."""

    def with_denoiser(self, name: str, keys: Mapping[str, Any]) -> SegueDriver:
        """A driver of another Segue whose denoiser is deployed with these keys."""
        model_dir, pipeline, dtype, config = self._made
        stages = dict(config.get("stages", {}))
        stages["denoiser"] = {**stages.get("denoiser", {}), **keys}
        return SegueDriver(model_dir, pipeline, dtype, {**config, "stages": stages}, name=f"{SEGUE}, {name}")

    def denoising(self) -> float:
        """Seconds of the denoiser's steps so far; the stage reports them when it becomes idle."""
        steps = snapshot(self.stats()).get(_DENOISING)
        return 0.0 if steps is None else steps.sum

    async def run(self, request: ImageRequest) -> ImageOutcome:
        return await self.make(self.asked(request), request)

    async def make(self, asked: Request, request: ImageRequest) -> ImageOutcome:
        """Send `asked`, Segue's form of the benchmark's `request`, and return its outcome."""
        sent = time.monotonic()
        preview, image = None, b""
        async with aclosing(self._omni.stream(asked)) as deltas:
            async for delta in deltas:
                if isinstance(delta, ImageDelta):
                    preview = preview or time.monotonic() - sent
                    image = delta.data if delta.partial is None else b""
                elif isinstance(delta, Finished):
                    jct = time.monotonic() - sent
                    assert preview is not None, "an image request ends with an image"
                    return ImageOutcome(
                        index=request.index, steps=request.steps, jct=jct, first_preview=preview, image=image
                    )
        raise AssertionError("a stream ends with Finished or an error")

    def asked(self, request: ImageRequest) -> Request:
        """Segue's form of a request."""
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
    """The same Segue with changed requests."""

    def __init__(self, name: str, segue: SegueDriver, **changes: Any) -> None:
        """`changes`: fields of `DiffusionParams`."""
        self.name = f"{SEGUE}, {name}"
        self._segue = segue
        self._changes = changes

    @property
    def startup(self) -> float:
        return self._segue.startup

    async def start(self) -> None:
        """Nothing to do: the other driver started Segue."""

    async def take_over(self, together: int) -> None:
        """Delegates to Segue."""

    async def hand_over(self) -> None:
        """Delegates to Segue."""

    async def stop(self) -> None:
        """Nothing to do: the other driver stops Segue."""

    def processes(self) -> dict[int, str]:
        return self._segue.processes()

    async def run(self, request: ImageRequest) -> ImageOutcome:
        return await self._segue.make(changed(self._segue.asked(request), **self._changes), request)


def changed(asked: Request, **changes: Any) -> Request:
    """A copy of the request with other `DiffusionParams` fields."""
    assert asked.diffusion is not None
    return msgspec.structs.replace(asked, diffusion=msgspec.structs.replace(asked.diffusion, **changes))


def cached(segue: SegueDriver, step_cache: str, threshold: float | None) -> ChangedDriver:
    """The same Segue with a step cache."""
    name = step_cache + ("" if threshold is None else f" {threshold:g}")
    return ChangedDriver(name, segue, step_cache=step_cache, step_cache_threshold=threshold)


class ReferenceProcess(ChildProcess[ImageRequest, Loaded, Answer]):
    """A process of `segue.bench.diffusion.reference`."""

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        super().__init__("diffusers", "segue.bench.diffusion.reference", options, Loaded, Answer, environment)


class ReferenceDriver(ChildDriver[ReferenceProcess]):
    """One way of serving with the process; its name is `ONE` or `BATCH`."""

    async def take_over(self, together: int) -> None:
        """Set the process's way of serving; a list is as long as the number of clients."""
        most = together if self.name == BATCH else 1
        await self.process.send(Policy(most, GATHER_SECONDS if most > 1 else 0.0))

    async def run(self, request: ImageRequest) -> ImageOutcome:
        sent = time.monotonic()
        answer = await self.process.ask(request)
        jct = time.monotonic() - sent
        return ImageOutcome(
            index=request.index,
            steps=request.steps,
            jct=jct,
            first_preview=jct,
            image=answer.image,
            network=answer.network,
        )
