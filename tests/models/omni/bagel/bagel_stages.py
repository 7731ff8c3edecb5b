"""The stages of a BAGEL checkpoint in one process, each behind its engine or called as its engine does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bagel_reference import picture

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contexts.engine import ContextEngine
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import LoadContext, Payload, SameWorker, StageOutput, StageRequest
from segue.engines.diffusion.batch import CostTable
from segue.engines.diffusion.contract import DenoiserContext
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.omni.bagel.stages import STAGE_MODELS, TRANSFERS

TOKENS = 16
"""Of a reply."""
THOUGHTS = 60
"""Of thoughts."""
Part = str | tuple[int, int]
"""A text, or the size of an image."""
CPU = torch.device("cpu")


def request_of(parts: list[Part], name: str = "r", system: str | None = None, **more: Any) -> Request:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": np.array(picture(*part))}
        for part in parts
    ]
    said = [] if system is None else [{"role": "system", "content": system}]
    messages = messages_from([*said, {"role": "user", "content": content}], PYTHON_POLICY)
    return Request(request_id=name, messages=messages, **{"modalities": ["text"], **more})


def stage_request(
    name: str,
    stage: str,
    upstreams: set[str],
    request: Request | None = None,
    *,
    downstreams: set[str] = frozenset(),  # type: ignore[assignment]
    sampling: SamplingParams = FALLBACK,
    resume: list[int] | None = None,
) -> StageRequest:
    return StageRequest(
        name,
        stage,
        request or Request(request_id=name),
        sampling,
        seed=0,
        upstreams=frozenset(upstreams),
        downstreams=frozenset(downstreams),
        to_client=frozenset(),
        resume=list(resume or []),
    )


def sent(source: str, target: str, payload: Payload) -> Payload:
    request = stage_request("r", source, set())
    made = TRANSFERS[source, target](request, StageOutput("r", payload=payload, finished=True))
    assert made is not None
    return made


class Stages:
    """The stage models of a worker that has all stages, or (`draws` False) all but the denoiser."""

    def __init__(self, directory: Path, *, draws: bool = False) -> None:
        self.directory = directory
        base = {"model_dir": directory, "device": CPU, "dtype": torch.float32}
        self.same_worker = SameWorker(frozenset({"llm", "denoiser"} if draws else {"llm"}))
        self.input = STAGE_MODELS["input"](LoadContext(stage="input", **base))
        self.encoder = STAGE_MODELS["encoder"](LoadContext(stage="encoder", **base))
        self.llm = STAGE_MODELS["llm"](AutoregressiveContext(stage="llm", same_worker=self.same_worker, **base))
        self.same_worker.models["llm"] = self.llm
        self.vae_encoder = STAGE_MODELS["vae_encoder"](LoadContext(stage="vae_encoder", **base)) if draws else None
        self.decoder = STAGE_MODELS["decoder"](LoadContext(stage="decoder", **base)) if draws else None

    def denoiser(self, engine: ContextEngine) -> Any:
        """A denoiser that reads the cache of an engine."""
        same_worker = SameWorker(self.same_worker.stages, {"llm": self.llm}, {"llm": engine})
        context = DenoiserContext(Path(), "denoiser", CPU, torch.float32, same_worker=same_worker)
        return STAGE_MODELS["denoiser"](context)

    def encoded(self, payload: Payload) -> list[tuple[str, Payload, bool]]:
        """What the encoders make of an input payload: (stage, payload, final)."""
        made = []
        names = ("encoder", "vae_encoder") if "drawing" in payload else ("encoder",)
        for name in names if payload["media"] else ():
            model = getattr(self, name)
            for work in model.feed("r", "input", sent("input", name, payload), final=True):
                [result] = model.run([work])
                made.append((name, sent(name, "llm", result.payload), work.last))
        return made


@dataclass
class Drawn:
    """What came of requests for images."""

    latents: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """[1, C, h, w] of each output."""
    thoughts: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


class Unmeasured(CostTable):
    """So that batches do not depend on the speed of the machine."""

    def enter(self, tokens: int, rows: int, seconds: float) -> None:
        pass


class Drawing:
    """Requests for images through all stages, and replies beside them, as a worker runs them: engines step in turn."""

    def __init__(self, stages: Stages, *, max_rows: int = 16, **config: Any) -> None:
        self.stages = stages
        given = AutoregressiveConfig(**{"num_blocks": 300, "block_size": 8, **config})
        self.inner = AutoregressiveEngine(stages.llm, given)
        self.reader = ContextEngine(self.inner, stages.llm)
        self.denoiser = DiffusionEngine(stages.denoiser(self.reader), DiffusionConfig(max_batch=max_rows))
        self.denoiser.costs = Unmeasured()
        self.made = Drawn()

    def add(self, name: str, request: Request, *, resume: list[int] | None = None) -> None:
        """Give a request for an image to all stages."""
        payload = self.stages.input.process(request)
        encoders = {"encoder", "vae_encoder"} if payload["media"] else set()
        sampling = SamplingParams(max_tokens=THOUGHTS).over(self.stages.llm.default_sampling).over(FALLBACK)
        self.denoiser.add(stage_request(name, "denoiser", {"llm"}, request))
        self.reader.add(
            stage_request(
                name,
                "llm",
                {"input", *encoders},
                request,
                downstreams={"denoiser"},
                sampling=sampling,
                resume=resume,
            )
        )
        self.made.thoughts[name], self.made.latents[name] = [], []
        self.reader.feed(name, "input", sent("input", "llm", payload), final=True)
        for source, chunk, final in self.stages.encoded(payload):
            self.reader.feed(name, source, chunk, final=final)

    def reply(self, name: str, request: Request) -> None:
        """Give a request for a reply."""
        payload = self.stages.input.process(request)
        upstreams = {"input", "encoder"} if payload["media"] else {"input"}
        sampling = SamplingParams(max_tokens=TOKENS).over(self.stages.llm.default_sampling).over(FALLBACK)
        self.reader.add(stage_request(name, "llm", upstreams, request, sampling=sampling))
        self.made.thoughts[name] = []
        self.reader.feed(name, "input", sent("input", "llm", payload), final=True)
        for source, chunk, final in self.stages.encoded(payload):
            self.reader.feed(name, source, chunk, final=final)

    def step(self) -> None:
        """One step of each engine that has work."""
        if self.reader.has_work():
            for output in self.reader.step():
                name = output.request_id
                if output.error is not None:
                    self.made.errors[name] = output.error
                    self.denoiser.cancel(name)
                    continue
                self.made.thoughts[name] += output.token_ids
                self.made.cached[name] = self.made.cached.get(name, 0) + output.cached_tokens
                if output.prompt_tokens:
                    self.made.counts[name] = output.modality_tokens
                if output.payload is not None:
                    assert output.finished
                    self.denoiser.feed(name, "llm", sent("llm", "denoiser", output.payload), final=True)
            self.inner.audit()
        if self.denoiser.has_work():
            for output in self.denoiser.step():
                if output.error is not None:
                    self.made.errors[output.request_id] = output.error
                elif output.payload is not None and "partial" not in output.payload:
                    self.made.latents[output.request_id].append(output.payload["latents"])
            self.inner.audit()

    @property
    def busy(self) -> bool:
        return self.reader.has_work() or self.denoiser.has_work()

    def run(self) -> Drawn:
        """Step until all is done. Nothing is held then."""
        while self.busy:
            self.step()
        assert self.inner.resources.pool.used == 0
        return self.made
