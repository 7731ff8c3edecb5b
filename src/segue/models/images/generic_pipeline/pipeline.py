"""Run the library's whole pipeline as one stage. Nothing is batched; between two steps of a request, other requests may
run theirs, and it may be cancelled."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.generic_pipeline.outputs import image_of, images_of, shown
from segue.models.images.generic_pipeline.signature import field_of, signature_of
from segue.models.images.generic_pipeline.stepped import Stepped
from segue.models.shared.checkpoint.pretrained import without_bars
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers
from segue.models.shared.diffusion.library import SchedulerMixin
from segue.models.shared.diffusion.loading import UNREADABLE, pipeline_index, variant_of


@dataclass(slots=True)
class _State:
    """The state of one request."""

    request: StageRequest
    call: Stepped | None = None
    steps: int = 0
    fps: float = 0.0
    outputs: int = 1
    made: np.ndarray | None = None
    """[outputs, (frames,) h, w, 3] in [0, 1], once complete."""


class WholePipeline:
    """`ModuleModel`. A request has one work item per step, then one per output."""

    def __init__(self, ctx: LoadContext) -> None:
        if ctx.load_format != "auto":
            raise ConfigError(
                "a whole pipeline is loaded with its own weights: load_format is auto", field="load_format"
            )
        self._signature = signature_of(ctx.model_dir)
        marks = {variant_of(path) for path in ctx.model_dir.iterdir() if path.is_dir()} - {None}
        try:
            with without_bars():
                self._pipeline: Any = self._signature.kind.from_pretrained(
                    ctx.model_dir,
                    dtype=ctx.dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    # parts without this variant load their plain files
                    variant=marks.pop() if len(marks) == 1 else None,
                )
        except UNREADABLE as error:
            raise ConfigError(f"{ctx.model_dir}: the pipeline cannot be loaded: {error}", field="model") from error
        self._device = ctx.device
        self._pipeline.to(ctx.device)
        self._pipeline.set_progress_bar_config(disable=True)
        self._schedulers = Schedulers(ctx.model_dir) if "scheduler" in pipeline_index(ctx.model_dir) else None
        ctx.progress(1.0, self._signature.kind.__name__)

    def warm_up(self) -> None:
        """Does nothing: the arguments of a valid request are not known here."""

    def begin(self, request: StageRequest) -> tuple[_State, list[Work]]:
        return _State(request), []

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Take the input stage's only chunk."""
        state.steps, state.outputs, state.fps = payload["steps"], payload["outputs"], payload["fps"]
        state.call = Stepped(lambda pause: self._called(state, payload, pause), self._device)
        name = state.request.request_id
        works = [Work(name, (state, None), name) for _ in range(state.steps)]
        works += [Work(name, (state, index), name) for index in range(state.outputs)]
        works[-1].last = True
        return works

    def run(self, works: list[Work]) -> list[Result]:
        return [self._ran(*work.item) for work in works]

    def end(self, state: _State) -> None:
        if state.call is not None:
            state.call.give_up()

    def _ran(self, state: _State, index: int | None) -> Result:
        assert state.call is not None
        try:
            if index is None:
                before = state.call.pauses
                state.call.advance()
                moved = state.call.pauses > before
                return Result(progress=(state.call.pauses, state.steps) if moved else None)
            if state.made is None:
                state.made = images_of(state.call.finish(), state.outputs)
        except (ValueError, TypeError) as error:
            if state.call.pauses:
                raise
            raise InvalidRequest(
                f"the pipeline refuses the request: {error}", field=field_of(error, self._signature)
            ) from error
        return Result(shown(state.made[index], index, state.fps))

    def _called(self, state: _State, payload: Payload, pause: Any) -> Any:
        pipeline = self._fresh(payload["scheduler"])
        defaults = self._signature.defaults
        arguments = dict(payload["arguments"])
        for name, images in payload["images"].items():
            several = isinstance(images, list)
            arguments[name] = [image_of(one) for one in images] if several else image_of(images)
        if self._signature.count is not None:
            arguments[self._signature.count] = state.outputs
        if "callback_on_step_end" in defaults:

            def stepped(*step: Any) -> dict[str, Any]:
                pause()
                return {}

            arguments["callback_on_step_end"] = stepped
        elif "callback" in defaults and "callback_steps" in defaults:
            arguments["callback"], arguments["callback_steps"] = lambda *step: pause(), 1
        if "generator" in defaults:
            arguments["generator"] = torch.Generator().manual_seed(state.request.seed)
        return pipeline(**arguments, output_type="np")

    def _fresh(self, scheduler: str | None) -> Any:
        """A copy of the pipeline for one request: it shares the networks, and has its own schedulers and settings."""
        pipeline = copy.copy(self._pipeline)
        for name, part in self._pipeline.components.items():
            if isinstance(part, SchedulerMixin):
                setattr(pipeline, name, type(part).from_config(part.config))
        if scheduler is not None:
            assert self._schedulers is not None
            pipeline.scheduler = self._schedulers.make(scheduler)
        return pipeline
