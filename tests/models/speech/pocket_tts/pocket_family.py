"""What the tests of this family share: texts, the library's answers, and the stages driven as a worker drives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import StageOutput, StageRequest
from segue.messages.request import Message, Request, TextPart
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.speech.pocket_tts.backbone import Backbone
from segue.models.speech.pocket_tts.input import InputProcessor
from segue.models.speech.pocket_tts.stages import TRANSFERS

# after the family, which mends torchvision
from segue.engines.autoregressive.config import AutoregressiveConfig  # isort: skip
from segue.engines.autoregressive.engine import AutoregressiveEngine  # isort: skip
from segue.engines.autoregressive.sample.sampler import code_uniforms  # isort: skip

WIDTH = 8
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.7)


@dataclass(frozen=True)
class Case:
    name: str
    text: str
    voice: str = "alba"


CASES = (
    Case("words", "Hello there"),
    Case("another voice", "Hello there", "marius"),
    Case("sentence", "It was late, and nobody had come to the old house on the hill for many years."),
    Case("question", "Who is it, and what do you want from me?", "marius"),
)


def noise_of(seed: int, temperature: float, frames: int = 300) -> torch.Tensor:
    """[frames, WIDTH]: the noise of a request with this seed."""
    numbers = torch.from_numpy(code_uniforms(seed, 0, frames, WIDTH))
    return torch.special.ndtri(numbers) * temperature**0.5


def context(model_dir: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(model_dir, stage, torch.device("cpu"), torch.float32, **more)


def stage_request(stage: str, name: str, **more: Any) -> StageRequest:
    request = more.pop("request", None) or Request(request_id=name)
    values: dict[str, Any] = {"sampling": FALLBACK, "seed": 0, "upstreams": frozenset({"input"}), **more}
    return StageRequest(name, stage, request, downstreams=frozenset(), to_client=frozenset(), **values)


def request_of(case: Case) -> Request:
    said = [Message("user", [TextPart(case.text)])]
    return Request(request_id=case.name, messages=said, voice=case.voice, modalities=["audio"])


@dataclass
class Spoken:
    """What came of one request."""

    rows: list[list[int]]
    finish: str = ""
    cached: int = 0

    @property
    def latents(self) -> torch.Tensor:
        """[frames, WIDTH], normalised."""
        output = TokenOutput("r", codes=self.rows)
        payload = TRANSFERS["backbone", "vocoder"](stage_request("backbone", "r"), output)
        assert payload is not None
        latents: torch.Tensor = payload["codes"]
        return latents


class Speech:
    """Requests through the input stage and the backbone in its engine."""

    def __init__(self, input: InputProcessor, backbone: Backbone, **config: Any) -> None:
        self._input, self._backbone = input, backbone
        self.engine = AutoregressiveEngine(backbone, AutoregressiveConfig(**{"num_blocks": 400, **config}))

    def __call__(
        self,
        *cases: Case,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        resume: dict[str, list[list[int]]] | None = None,
    ) -> dict[str, Spoken]:
        """`resume`: rows of each request that were made before."""
        spoken = {case.name: Spoken([]) for case in cases}
        for case in cases:
            request = request_of(case)
            made = stage_request(
                "backbone",
                case.name,
                request=request,
                sampling=sampling.over(self._backbone.default_sampling).over(FALLBACK),
                seed=seed,
                resume=(resume or {}).get(case.name, []),
            )
            self.engine.add(made)
            output = StageOutput(case.name, payload=self._input.process(request), finished=True)
            payload = TRANSFERS["input", "backbone"](made, output)
            assert payload is not None
            self.engine.feed(case.name, "input", payload, final=True)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                one = spoken[output.request_id]
                one.rows += output.codes
                one.cached += output.cached_tokens
                one.finish = output.finish_reason or one.finish
            self.engine.audit()
        return spoken
