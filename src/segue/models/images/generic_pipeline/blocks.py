"""Load and run the modular blocks of one stage, with only those parts of the checkpoint that they need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.images.generic_pipeline.library import (
    BaseGuidance,
    ConditionalPipelineBlocks,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
    default_blocks,
    modular_kind,
)
from segue.models.images.generic_pipeline.splits import Split
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers
from segue.models.shared.diffusion.library import ModelMixin, PreTrainedModel, SchedulerMixin
from segue.models.shared.diffusion.loading import UNREADABLE, build, component_class, load_component, pipeline_index

GUIDANCE = ("guidance_scale", "guidance_rescale")
"""Pipeline arguments that blocks take from their guider."""
_PRETRAINED = "from_pretrained"
_NEGATIVE = "negative_"


class Pause(ModularPipelineBlocks):
    """The last block of a step: reports that the step is complete."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self._pause = pause

    def __call__(self, components: Any, block_state: Any, **step: Any) -> tuple[Any, Any]:
        self._pause()
        return components, block_state


class StageBlocks:
    """The loaded blocks of one stage."""

    def __init__(self, ctx: LoadContext, split: Split) -> None:
        """Raises `ConfigError` with the name of a part that is missing or unreadable."""
        self._ctx = ctx
        index = pipeline_index(ctx.model_dir)
        self._parts = {name for name, part in index.items() if isinstance(part, list) and None not in part}
        everything = default_blocks(split.kind)
        own = {name: everything[name] for name in split.stages[ctx.stage] if not self._skipped(everything[name])}
        self._blocks = SequentialPipelineBlocks.from_blocks_dict(own)
        self.takes = taken(self._blocks)
        self._insisted = frozenset(
            param.name
            for block in _all(self._blocks)
            for param in block.inputs
            if param.required and param.name and param.name.startswith(_NEGATIVE)
        )
        """Inputs of the negative prompt that blocks require but do not use without guidance."""
        order = list(split.stages)
        behind = [name for stage in order[order.index(ctx.stage) + 1 :] for name in split.stages[stage]]
        read = [param for name in behind for param in everything[name].inputs]
        self.later = frozenset(param.name for param in read if param.name)
        """State entries that blocks of later stages read."""
        self.later_groups = frozenset(param.kwargs_type for param in read if param.kwargs_type)
        self._schedulers: dict[str, Schedulers] = {}
        self._pipeline: Any = self._load(split, index)

    def run(self, arguments: Mapping[str, Any], state: PipelineState, pause: Callable[[], None] | None = None) -> None:
        """Run the blocks on a state. `arguments`: the pipeline's, for schedulers and guidance. `pause`: called after
        each step of a loop."""
        blocks = copy.deepcopy(self._blocks)
        for loop in _all(blocks):
            if isinstance(loop, LoopSequentialPipelineBlocks):
                loop.set_progress_bar_config(disable=True)
                if pause is not None:
                    loop.sub_blocks["pause"] = Pause(pause)
        for name in self._insisted:
            stand_in = state.get(name.removeprefix(_NEGATIVE))
            if state.get(name) is None and stand_in is not None:
                state.set(name, stand_in)
        with torch.no_grad():
            blocks(self._fresh(arguments), state)

    def state(self, arguments: Mapping[str, Any]) -> PipelineState:
        """The state before all blocks; arguments that these do not read are left out."""
        state = PipelineState()
        for param in self._blocks.inputs:
            if param.name:
                given = arguments.get(param.name)
                state.set(param.name, param.default if given is None else given, param.kwargs_type)
        for name in self.takes - state.values.keys():
            state.set(name, arguments.get(name))
        return state

    def _skipped(self, blocks: ModularPipelineBlocks) -> bool:
        """Whether these blocks run only for some requests, and their parts are missing in this checkpoint."""
        needed = {spec.name for spec in blocks.expected_components if spec.default_creation_method == _PRETRAINED}
        optional = isinstance(blocks, ConditionalPipelineBlocks) and blocks.default_block_name is None
        return optional and not needed <= self._parts

    def _load(self, split: Split, index: Mapping[str, Any]) -> Any:
        ctx = self._ctx
        specs = {spec.name: spec for spec in self._blocks.expected_components}
        for name, spec in specs.items():
            if spec.default_creation_method == _PRETRAINED and name not in self._parts:
                raise ConfigError(f"{ctx.model_dir}: the pipeline has no {name}", field="model")
        kind = modular_kind(split.kind)
        present = {name: value for name, value in index.items() if name in self._parts or not isinstance(value, list)}
        pipeline = kind(blocks=self._blocks, pretrained_model_name_or_path=str(ctx.model_dir), config_dict=present)
        for name in sorted(self._parts):
            if name in specs:
                pipeline.register_components(**{name: self._part(name)})
            elif issubclass(found := component_class(ctx.model_dir, name), ModelMixin):
                # blocks need only shapes of other stages' networks, e.g. how much a VAE compresses
                with torch.device("meta"):
                    setattr(pipeline, name, build(found, ctx.model_dir / name))
        ctx.progress(1.0, split.kind)
        return pipeline

    def _part(self, name: str) -> Any:
        ctx = self._ctx
        kind = component_class(ctx.model_dir, name)
        if issubclass(kind, ModelMixin | PreTrainedModel):
            return load_component(ctx, name)
        if issubclass(kind, SchedulerMixin):
            self._schedulers[name] = Schedulers(ctx.model_dir, name)
            return self._schedulers[name].make()
        try:
            return kind.from_pretrained(ctx.model_dir / name, local_files_only=True)
        except UNREADABLE as error:
            raise ConfigError(f"{ctx.model_dir / name}: cannot be loaded: {error}", field="model") from error

    def _fresh(self, arguments: Mapping[str, Any]) -> Any:
        """A copy of the pipeline for one request: it shares the networks, and has its own schedulers and guidance,
        which count steps."""
        pipeline = copy.copy(self._pipeline)
        for name, part in self._pipeline.components.items():
            if name in self._schedulers:
                asked = arguments.get("scheduler") if name == "scheduler" else None
                setattr(pipeline, name, self._schedulers[name].make(asked))
            elif isinstance(part, BaseGuidance):
                # the library's `new` logs a warning at each call, because guiders are experimental
                guider = copy.deepcopy(part)
                for key, value in _guidance(part, arguments).items():
                    setattr(guider, key, value)
                setattr(pipeline, name, guider)
        return pipeline


def taken(blocks: ModularPipelineBlocks) -> frozenset[str]:
    """The names of all state entries that blocks read: inputs, and the triggers of conditional blocks."""
    found = {param.name for param in blocks.inputs if param.name}
    for block in _all(blocks):
        if isinstance(block, ConditionalPipelineBlocks):
            found.update(name for name in block.block_trigger_inputs if name)
    return frozenset(found)


def _guidance(guider: BaseGuidance, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert pipeline arguments to the guider's: to a pipeline, a scale of 1 or less (in the original formulation, of
    0 or less) means no guidance; a guider disables itself only at exactly that value."""
    asked = {name: arguments[name] for name in GUIDANCE if name in guider.config and arguments.get(name) is not None}
    if "guidance_scale" in asked:
        none = 0.0 if guider.config.get("use_original_formulation") else 1.0
        asked["guidance_scale"] = max(asked["guidance_scale"], none)
    return asked


def _all(blocks: ModularPipelineBlocks) -> Iterator[ModularPipelineBlocks]:
    yield blocks
    for part in blocks.sub_blocks.values():
        yield from _all(part)
