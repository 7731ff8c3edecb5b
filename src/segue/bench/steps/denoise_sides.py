"""The sides of `segue bench denoise`, each in this process: Segue's engine, and the pipeline of `diffusers`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from segue.bench.harness.device import settle
from segue.engines.contract import StageRequest
from segue.engines.diffusion.contract import DenoiserContext, Row
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.messages.diffusion import DiffusionParams, diffusion_from
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.registry import family_of, read_config
from segue.models.shared.diffusion.library import LIBRARIES
from segue.models.shared.diffusion.loading import component_class, load_component
from segue.models.shared.diffusion.shapes import Shape

_STAGE, _TEXTS = "denoiser", "text_encoder"
GUIDANCE = 4.0
_PROMPT, _NEGATIVE, _PADDED = 64, 24, 512
"""Tokens of texts; the last if a network requires texts of one length."""


@dataclass(frozen=True, kw_only=True)
class Painted:
    """The workload of all sides, with random weights."""

    directory: Path
    shape: Shape
    request: dict[str, Any]
    """Height, width, and the like."""
    device: torch.device
    dtype: torch.dtype
    steps: int
    together: int
    """Maximum number of simultaneous requests."""
    deployed: dict[str, Any] = field(default_factory=dict)
    """Fields of `DenoiserContext`, for Segue."""

    @property
    def context(self) -> DenoiserContext:
        return DenoiserContext(
            model_dir=self.directory,
            stage=_STAGE,
            device=self.device,
            dtype=self.dtype,
            load_format="dummy",
            **self.deployed,
        )

    def params(self, steps: int, **more: Any) -> DiffusionParams:
        given = {**self.request, "num_inference_steps": steps, "max_sequence_length": _PADDED, **more}
        given[self.shape.guidance] = GUIDANCE
        if "num_frames" in self.request:
            given["fps"] = 24.0
        return diffusion_from(given)

    def texts(self, tokens: int, seed: int) -> torch.Tensor:
        """[tokens, width]: stands for a text encoder's output."""
        drawn = torch.randn(tokens, self.shape.text_width, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.dtype)


class Side(Protocol):
    """One way to denoise; constructing it loads it."""

    def run(self, count: int, steps: int) -> tuple[float, list[torch.Tensor]]:
        """Run `count` simultaneous requests: seconds until all finish, and their latents."""


class SegueSide:
    """The engine of the denoiser, without a worker."""

    def __init__(self, painted: Painted, **changes: Any) -> None:
        """`changes`: parameters of every request."""
        family = family_of(read_config(painted.directory), painted.directory)
        self._painted = painted
        self._changes = changes
        self._stage_model = family.load_stages().STAGE_MODELS[_STAGE](painted.context)
        self._engine = DiffusionEngine(self._stage_model, DiffusionConfig(max_batch=2 * painted.together))
        with torch.inference_mode():
            self._engine.warm_up()
        self._served = 0

    def run(self, count: int, steps: int) -> tuple[float, list[torch.Tensor]]:
        engine, painted = self._engine, self._painted
        made: dict[str, torch.Tensor] = {}
        names = []
        settle(painted.device)
        began = time.perf_counter()
        with torch.inference_mode():
            for seed in range(count):
                names.append(str(self._served))
                self._served += 1
                engine.add(asked(names[-1], seed))
                for upstream, payload in inputs(painted, painted.params(steps, **self._changes), seed).items():
                    engine.feed(names[-1], upstream, payload, final=True)
            while engine.has_work():
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    if output.payload is not None:
                        made[output.request_id] = output.payload["latents"]
        settle(painted.device)
        return time.perf_counter() - began, [made[name] for name in names]


class LibrarySide:
    """The library's pipeline, one request at a time, without encoders and decoder."""

    def __init__(self, painted: Painted, *, compiled: bool) -> None:
        self._painted = painted
        context = painted.context
        scheduler = component_class(painted.directory, "scheduler")
        network = load_component(context, "transformer")
        if compiled:
            network.compile_repeated_blocks()
        parts = {"text_encoder": None, "tokenizer": None, "transformer": network}
        parts["vae"] = load_component(context, "vae")
        parts["scheduler"] = scheduler.from_pretrained(painted.directory, subfolder="scheduler")
        kind = getattr(LIBRARIES["diffusers"], painted.shape.pipeline)
        self._pipeline = kind(**parts, **painted.shape.settings)
        self._pipeline.set_progress_bar_config(disable=True)

    def run(self, count: int, steps: int) -> tuple[float, list[torch.Tensor]]:
        painted = self._painted
        settle(painted.device)
        began = time.perf_counter()
        with torch.inference_mode():
            made = [self._one(steps, seed) for seed in range(count)]
        settle(painted.device)
        return time.perf_counter() - began, made

    def _one(self, steps: int, seed: int) -> torch.Tensor:
        painted = self._painted
        given: dict[str, Any] = {}
        for name, tokens in (("prompt", _PROMPT), ("negative_prompt", _NEGATIVE)):
            texts = painted.texts(tokens, seed)[None]
            if painted.shape.pipeline.startswith("Wan"):
                texts = torch.nn.functional.pad(texts, (0, 0, 0, _PADDED - tokens))
            else:
                given[f"{name}_embeds_mask"] = torch.ones(1, tokens, dtype=torch.long, device=painted.device)
            given[f"{name}_embeds"] = texts
        made: torch.Tensor = self._pipeline(
            **painted.request,
            **given,
            **{painted.shape.guidance: GUIDANCE},
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        )[0]
        return made


def asked(name: str, seed: int) -> StageRequest:
    """A request for a denoiser, which receives settings and texts."""
    upstreams, downstreams = frozenset(("input", _TEXTS)), frozenset(("decoder",))
    return StageRequest(name, _STAGE, Request(request_id=name), FALLBACK, seed, upstreams, downstreams, frozenset())


def inputs(painted: Painted, params: DiffusionParams, seed: int) -> dict[str, dict[str, Any]]:
    """Input payloads by upstream stage."""
    texts = [{"embeds": painted.texts(tokens, seed)} for tokens in (_PROMPT, _NEGATIVE)]
    return {"input": {"settings": msgspec.to_builtins(params)}, _TEXTS: {"texts": texts}}


def row_flops(painted: Painted) -> float:
    """Operations of one call of the network for one row: matmuls and attention, counted by torch on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    meta = replace(painted, device=torch.device("meta"), deployed={})
    family = family_of(read_config(meta.directory), meta.directory)
    stage_model = family.load_stages().STAGE_MODELS[_STAGE](meta.context)
    state = stage_model.begin(asked("counted", 0))
    samples: Sequence[Any] = []
    for upstream, payload in inputs(meta, meta.params(2), 0).items():
        samples = stage_model.feed(state, upstream, payload, final=True) or samples
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        stage_model.predict([Row(samples[0], 0)])
    return float(counter.get_total_flops())
