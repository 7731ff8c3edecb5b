"""Segue as the sides of `segue bench diffusion`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import yaml

from segue.bench.diffusion.reference import TRUE_CFG, guided
from segue.bench.diffusion.workload import ImageOutcome, ImageRequest
from segue.bench.harness.async_omni import AsyncOmniDriver
from segue.bench.harness.load import LoadDriver
from segue.bench.harness.stats import snapshot
from segue.messages.deltas import Finished, ImageDelta
from segue.messages.diffusion import DiffusionParams
from segue.messages.request import Request

SEGUE = "segue"
_DENOISING = ("denoiser", "step_seconds")

ImageDriver = LoadDriver[ImageRequest, ImageOutcome]


def deployment(file: Path | None) -> Mapping[str, Any]:
    """The contents of a deployment file; empty without one."""
    found: Mapping[str, Any] = {} if file is None else yaml.safe_load(file.read_text())
    return found


class SegueDriver(AsyncOmniDriver):
    """Sends requests to a running Segue."""

    previews = 0
    """Number of previews that every further request asks for."""

    def __init__(
        self,
        model_dir: Path,
        pipeline: str,
        dtype: str,
        config: Mapping[str, Any],
        name: str = SEGUE,
        adapter: str | None = None,
        **changes: Any,
    ) -> None:
        """`pipeline`: the class that `model_index.json` names; `config`: Segue's deployment; `adapter`: LoRA adapter of
        every request; `changes`: fields of its `DiffusionParams`."""
        super().__init__(name, model_dir, dtype=dtype, config=config)
        self.model_dir = model_dir
        self._made = (model_dir, pipeline, dtype)
        self._config, self._adapter, self._changes = config, adapter, changes
        self.true_cfg = TRUE_CFG in guided(pipeline, 1.0)
        """Whether the guidance parameter is `true_cfg_scale`; else it is `guidance_scale`."""

    def with_denoiser(self, name: str, keys: Mapping[str, Any], **more: Any) -> SegueDriver:
        """A driver of another Segue whose denoiser is deployed with these keys. `more`: adapter and changes."""
        stages = dict(self._config.get("stages", {}))
        stages["denoiser"] = {**stages.get("denoiser", {}), **keys}
        return SegueDriver(*self._made, {**self._config, "stages": stages}, name=f"{SEGUE}, {name}", **more)

    def denoising(self) -> float:
        """Seconds of the denoiser's steps so far; the stage reports them when it becomes idle."""
        steps = snapshot(self.stats()).get(_DENOISING)
        return 0.0 if steps is None else steps.sum

    async def run(self, request: ImageRequest, **changes: Any) -> ImageOutcome:
        """`changes`: further ones of this request."""
        sent = time.monotonic()
        params = DiffusionParams(
            negative_prompt=request.negative_prompt,
            height=request.size,
            width=request.size,
            num_inference_steps=request.steps,
            partial_images=self.previews,
            true_cfg_scale=request.guidance if self.true_cfg else None,
            guidance_scale=None if self.true_cfg else request.guidance,
        )
        asked = Request(
            request_id=uuid.uuid4().hex,
            prompt=request.prompt,
            modalities=["image"],
            seed=request.seed,
            adapter=self._adapter,
            diffusion=msgspec.structs.replace(params, **self._changes, **changes),
        )
        preview, image = None, b""
        async with aclosing(self._omni.stream(asked)) as deltas:
            async for delta in deltas:
                came = time.monotonic() - sent
                if isinstance(delta, ImageDelta):
                    preview = preview or came
                    image = delta.data if delta.partial is None else b""
                elif isinstance(delta, Finished):
                    assert preview is not None, "an image request ends with an image"
                    return ImageOutcome(
                        index=request.index, steps=request.steps, jct=came, first_preview=preview, image=image
                    )
        raise AssertionError("a stream ends with Finished or an error")


class ChangedDriver:
    """The same Segue with changed requests; the other driver starts and stops it."""

    def __init__(self, name: str, segue: SegueDriver, **changes: Any) -> None:
        """`changes`: fields of `DiffusionParams`."""
        self.name = f"{SEGUE}, {name}"
        self._segue = segue
        self._changes = changes

    @property
    def startup(self) -> float:
        return self._segue.startup

    async def _nothing(self, together: int = 0) -> None:
        """The other driver does it."""

    start = take_over = hand_over = stop = _nothing

    def processes(self) -> dict[int, str]:
        return self._segue.processes()

    async def run(self, request: ImageRequest) -> ImageOutcome:
        return await self._segue.run(request, **self._changes)


def cached(segue: SegueDriver, step_cache: str, threshold: float | None) -> ChangedDriver:
    """The same Segue with a step cache."""
    name = step_cache + ("" if threshold is None else f" {threshold:g}")
    return ChangedDriver(name, segue, step_cache=step_cache, step_cache_threshold=threshold)
