"""All stages of a diffusion family in one process: engines batch as those of workers do, and nothing is sent."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import torch

from segue.engines.contract import Engine, StageOutput, StageRequest
from segue.engines.diffusion.batch import CostTable
from segue.engines.diffusion.contract import DenoiserContext, DiffusionModel
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.engines.module.contract import ModuleModel
from segue.engines.module.engine import ModuleEngine
from segue.engines.ranks import Leading
from segue.graph.deployment.options import LoraPlan
from segue.media.parts import IMAGES, image_parts
from segue.media.sources import PYTHON_POLICY
from segue.messages.diffusion import PARAMETERS, diffusion_from
from segue.messages.request import Message, Request
from segue.messages.sampling import FALLBACK
from segue.models.registry import family_of, read_config

WITHIN = 1e-3
"""Largest difference of a pixel in [0, 1]."""


@dataclass
class Made:
    """What came of one request."""

    latents: dict[int, torch.Tensor] = field(default_factory=dict)
    shown: dict[int, np.ndarray] = field(default_factory=dict)
    """By index: uint8 images or frames, as the client gets them."""
    previews: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    progress: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[tuple[int, int, float]] = field(default_factory=list)
    """(index, frames, frames per second) of each piece of a video."""
    pixels: list[torch.Tensor] = field(default_factory=list)
    """[h, w, 3] or [frames, h, w, 3] in [0, 1], before they are rounded."""


class Untimed(CostTable):
    """Batches as large as can be: seconds measured in a test are those of whatever else the machine does."""

    def enter(self, tokens: int, rows: int, seconds: float) -> None:
        """Forgets it."""


class Chain:
    """A checkpoint, loaded; its adapters by stage."""

    def __init__(
        self,
        model_dir: Path,
        *,
        load_format: str = "auto",
        options: Mapping[str, Mapping[str, Any]] | None = None,
        lora: LoraPlan | None = None,
    ) -> None:
        """`options`: of stages, by name; `lora`: of the denoiser."""
        config = read_config(model_dir)
        family = family_of(config, model_dir)
        self.graph = family.graph(config)
        self.stages = family.load_stages()
        self.adapters: dict[str, Any] = {}
        for name in self.graph.topological():
            given = dict((options or {}).get(name, {}))
            ctx = DenoiserContext(
                model_dir, name, torch.device("cpu"), torch.float32, load_format=load_format, options=given
            )
            if self.graph.stages[name].engine == "diffusion":
                ctx.lora = lora
            self.adapters[name] = self.stages.STAGE_MODELS[name](ctx)
        self.batches: list[int] = []
        """Rows of each step of the denoiser."""

    def through(self, adapter: DiffusionModel | ModuleModel | Leading, stage: str = "denoiser") -> Chain:
        """The same with another adapter of a stage, or with an engine of several ranks."""
        other = copy.copy(self)
        other.adapters = {**self.adapters, stage: adapter}
        return other

    def run(self, *asked: Mapping[str, Any], late: Mapping[int, int] | None = None, max_batch: int = 16) -> list[Made]:
        """All requests together; request i joins after `late[i]` steps of the denoiser. Raises what one fails with."""
        engines: dict[str, Engine] = {}
        for name in self.graph.topological():
            diffusion = self.graph.stages[name].engine == "diffusion"
            if isinstance(self.adapters[name], Leading):
                engines[name] = self.adapters[name]
            elif diffusion:
                engine = DiffusionEngine(self.adapters[name], DiffusionConfig(max_batch=max_batch))
                engine.costs = Untimed()
                engines[name] = engine
            else:
                engines[name] = ModuleEngine(self.adapters[name])
        made = [Made() for _ in asked]
        requests: list[dict[str, StageRequest]] = [{} for _ in asked]
        waiting = {index: (late or {}).get(index, 0) for index in range(len(asked))}
        self.batches, steps = [], 0
        while waiting or any(engine.has_work() for engine in engines.values()):
            for index in [index for index, after in waiting.items() if after <= steps]:
                del waiting[index]
                requests[index] = self._begin(engines, index, asked[index])
            for name, engine in engines.items():
                if not engine.has_work():
                    continue
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    index = int(output.request_id)
                    msgspec.msgpack.encode((output.prompt_tokens, output.modality_tokens))  # a worker would send them
                    self._note(made[index], name, output)
                    for target in self.graph.downstreams(name):
                        payload = self.stages.TRANSFERS[name, target](requests[index][name], output)
                        if payload is not None or output.finished:
                            engines[target].feed(output.request_id, name, payload or {}, final=output.finished)
                if isinstance(engine, DiffusionEngine | Leading):
                    steps += 1
                    self.batches.append(int(engine.stats()["batch"]))
        for one in made:
            decoder = self.adapters[self.graph.main]
            one.pixels = [decoder.pixels(one.latents[place])[0] for place in sorted(one.latents)]
        return made

    def _begin(self, engines: Mapping[str, Engine], index: int, asked: Mapping[str, Any]) -> dict[str, StageRequest]:
        gives = self.graph.gives
        images = image_parts({key: asked[key] for key in asked if key in IMAGES}, PYTHON_POLICY)
        request = Request(
            request_id=str(index),
            prompt=asked["prompt"],
            messages=[Message("user", list(images))] if images else [],
            modalities=sorted(gives),
            seed=asked.get("seed", 0),
            adapter=asked.get("adapter"),
            options=dict(asked.get("options", {})),
            diffusion=diffusion_from({key: asked[key] for key in asked if key in PARAMETERS}),
        )
        made = {}
        for name, stage in self.graph.walk(request).items():
            made[name] = StageRequest(
                request_id=str(index),
                stage=name,
                request=request,
                sampling=FALLBACK,
                seed=request.seed or 0,
                upstreams=stage.upstreams,
                downstreams=stage.downstreams,
                to_client=stage.to_client,
            )
        for name in reversed(list(made)):  # whoever gets something is there before it is sent
            engines[name].add(made[name])
        return made

    def _note(self, made: Made, stage: str, output: StageOutput) -> None:
        payload = output.payload or {}
        if output.progress is not None:
            made.progress.append((output.index, output.progress[0]))
        if "latents" in payload and payload.get("partial") is None and self.graph.stages[stage].engine == "diffusion":
            made.latents[payload["index"]] = payload["latents"]
        shown = payload.get("image", payload.get("video")) if self.graph.stages[stage].gives else None
        if shown is not None:
            partial = payload.get("partial")
            if partial is not None:
                made.previews[payload["index"], partial] = shown.numpy()
            elif "video" in payload:
                so_far = made.shown.get(payload["index"], shown.numpy()[:0])
                assert len(so_far) == payload["first"], "pieces of a video come in order"
                made.shown[payload["index"]] = np.concatenate([so_far, shown.numpy()])
                made.pieces.append((payload["index"], len(shown), payload["fps"]))
            else:
                made.shown[payload["index"]] = shown.numpy()


@contextmanager
def quiet() -> Iterator[None]:
    """diffusers logs what it makes of arguments."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def pipeline_of(model_dir: Path, kind: str, **parts: Any) -> Any:
    """The library's own pipeline on a checkpoint; `parts`: in place of the checkpoint's."""
    with quiet():
        pipeline = getattr(diffusers, kind).from_pretrained(model_dir, dtype=torch.float32, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def expected(pipeline: Any, asked: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the library's pipeline makes of a request: [h, w, 3] or [frames, h, w, 3] each."""
    given = {key: asked[key] for key in asked if key not in ("seed", "scheduler", "adapter")}
    with quiet(), torch.inference_mode():
        made = pipeline(**given, generator=torch.Generator().manual_seed(asked.get("seed", 0)), output_type="np")
    return [torch.as_tensor(np.asarray(one)) for one in made[0]]


def apart(ours: Made, theirs: list[torch.Tensor]) -> float:
    """Largest difference of a pixel; infinite where the shapes differ."""
    if [one.shape for one in ours.pixels] != [one.shape for one in theirs]:
        return float("inf")
    return max(float((mine - yours).abs().max()) for mine, yours in zip(ours.pixels, theirs, strict=True))
