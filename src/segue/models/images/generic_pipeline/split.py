"""Stages of modular blocks. Each runs its blocks on the state of the previous stages; between two steps of a request,
other requests may run theirs, and it may be cancelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.graph.stage_graph import INPUT
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.generic_pipeline.blocks import StageBlocks
from segue.models.images.generic_pipeline.library import PipelineState
from segue.models.images.generic_pipeline.outputs import image_of, images_of, shown
from segue.models.images.generic_pipeline.signature import field_of, signature_of
from segue.models.images.generic_pipeline.splits import split_of
from segue.models.images.generic_pipeline.state import pack, unpack
from segue.models.images.generic_pipeline.stepped import Stepped
from segue.models.shared.diffusion.loading import pipeline_index


@dataclass(slots=True)
class _Held:
    """The state of one request."""

    request: StageRequest
    inputs: dict[str, Payload] = field(default_factory=dict)
    """By upstream stage."""
    final: set[str] = field(default_factory=set)
    state: PipelineState = field(default_factory=PipelineState)
    call: Stepped | None = None
    made: np.ndarray | None = None
    """[outputs, (frames,) h, w, 3] in [0, 1], once decoded."""

    @property
    def settings(self) -> Payload:
        return self.inputs[INPUT]

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The pipeline's arguments, defaults included."""
        given: Mapping[str, Any] = self.settings["arguments"]
        return {**given, "scheduler": self.settings["scheduler"]}


class _Stage:
    """`ModuleModel` without `run`."""

    def __init__(self, ctx: LoadContext) -> None:
        split = split_of(pipeline_index(ctx.model_dir))
        if split is None:
            raise ConfigError(f"{ctx.model_dir}: its pipeline is not split into stages", field="model")
        self._signature = signature_of(ctx.model_dir)
        self._device = ctx.device
        self._blocks = StageBlocks(ctx, split)

    def warm_up(self) -> None:
        """Does nothing: the arguments of a valid request are not known here."""

    def begin(self, request: StageRequest) -> tuple[_Held, list[Work]]:
        return _Held(request), []

    def feed(self, state: _Held, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        if payload:
            state.inputs[upstream] = payload
        if final:
            state.final.add(upstream)
        if state.final != state.request.upstreams:
            return []
        state.state = self._opened(state)
        works = self.works(state)
        works[-1].last = True
        return works

    def works(self, held: _Held) -> list[Work]:
        name = held.request.request_id
        return [Work(name, (held, None), name)]

    def end(self, state: _Held) -> None:
        if state.call is not None:
            state.call.give_up()

    def _opened(self, held: _Held) -> PipelineState:
        """The pipeline state before this stage's blocks."""
        arguments = dict(held.arguments)
        for name, images in held.settings.get("images", {}).items():
            arguments[name] = [image_of(one) for one in images] if isinstance(images, list) else image_of(images)
        if self._signature.count is not None:
            arguments[self._signature.count] = held.settings["outputs"]
        state = self._blocks.state({**arguments, "output_type": "np"})
        for upstream in sorted(held.inputs.keys() - {INPUT}):
            unpack(held.inputs[upstream], state, self._device)
        if "generator" in self._blocks.takes and state.get("generator") is None:
            state.set("generator", torch.Generator().manual_seed(held.request.seed))
        return state

    def _sent(self, held: _Held, before: Mapping[str, Any]) -> Payload:
        """The entries left by the blocks that later ones read."""
        changed = {
            name
            for name, value in held.state.values.items()
            if name in self._blocks.later and (value is not before.get(name) or name == "generator")
        }
        return pack(held.state, frozenset(changed), self._blocks.later_groups)

    def _refused(self, error: Exception) -> InvalidRequest:
        return InvalidRequest(f"the pipeline refuses the request: {error}", field=field_of(error, self._signature))


class BlockEncoder(_Stage):
    """Text or image encoder: one work item."""

    def run(self, works: list[Work]) -> list[Result]:
        return [self._ran(work.item[0]) for work in works]

    def _ran(self, held: _Held) -> Result:
        before = dict(held.state.values)
        try:
            self._blocks.run(held.arguments, held.state)
        except (ValueError, TypeError) as error:
            raise self._refused(error) from error
        return Result(self._sent(held, before))


class BlockDenoiser(_Stage):
    """One work item per step, then one for the blocks after the loop."""

    def works(self, held: _Held) -> list[Work]:
        before = dict(held.state.values)

        def call(pause: Any) -> Mapping[str, Any]:
            self._blocks.run(held.arguments, held.state, pause)
            return before

        held.call = Stepped(call, self._device)
        name = held.request.request_id
        steps = [Work(name, (held, step), name) for step in range(held.settings["steps"])]
        return [*steps, Work(name, (held, None), name)]

    def run(self, works: list[Work]) -> list[Result]:
        return [self._ran(*work.item) for work in works]

    def _ran(self, held: _Held, step: int | None) -> Result:
        assert held.call is not None
        steps = held.settings["steps"]
        pauses = held.call.pauses
        try:
            if step is None:
                return Result(self._sent(held, held.call.finish()))
            held.call.advance()
        except (ValueError, TypeError) as error:
            if held.call.pauses:
                raise
            raise self._refused(error) from error
        return Result(progress=(held.call.pauses, steps) if held.call.pauses > pauses else None)


class BlockDecoder(_Stage):
    """One work item per output; the first decodes them all."""

    def works(self, held: _Held) -> list[Work]:
        name = held.request.request_id
        return [Work(name, (held, index), name) for index in range(held.settings["outputs"])]

    def run(self, works: list[Work]) -> list[Result]:
        return [self._ran(*work.item) for work in works]

    def _ran(self, held: _Held, index: int) -> Result:
        if held.made is None:
            self._blocks.run(held.arguments, held.state)
            held.made = images_of(held.state.values, held.settings["outputs"])
        return Result(shown(held.made[index], index, held.settings["fps"]))
