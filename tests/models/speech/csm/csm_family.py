"""What the tests of this family share: conversations, the library's answers, and the stages driven as a worker drives
them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.messages.request import ArrayInfo, MediaPart, Message, Request, TextPart
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.speech.csm.backbone import Backbone
from segue.models.speech.csm.encoder import Encoder
from segue.models.speech.csm.input import InputProcessor
from segue.models.speech.csm.library import CsmForConditionalGeneration, CsmProcessor
from segue.models.speech.csm.stages import TRANSFERS

# after the family, which mends torchvision
from segue.engines.autoregressive.config import AutoregressiveConfig  # isort: skip
from segue.engines.autoregressive.engine import AutoregressiveEngine  # isort: skip

ROWS = 70
RATE = 24_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=ROWS)


def context(model_dir: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(model_dir, stage, torch.device("cpu"), torch.float32, **more)


def stage_request(stage: str, *, upstreams: set[str], **more: Any) -> StageRequest:
    return StageRequest(
        request_id=more.pop("request_id", "r"),
        stage=stage,
        request=more.pop("request", None) or Request(request_id="r"),
        sampling=more.pop("sampling", GREEDY),
        seed=more.pop("seed", 0),
        upstreams=frozenset(upstreams),
        downstreams=frozenset(),
        to_client=frozenset(),
        **more,
    )


# --- conversations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    speaker: str
    text: str
    samples: int = 0
    """Of its recording; 0: none."""


@dataclass(frozen=True)
class Case:
    name: str
    turns: tuple[Turn, ...]


CASES = (
    Case("words", (Turn("0", "Hello there"),)),
    Case("another voice", (Turn("1", "Hello there"),)),
    Case("sentence", (Turn("0", "it was late, and nobody had come to the old house on the hill for many years"),)),
    Case("heard before", (Turn("0", "Who is it?", 11_111), Turn("0", "Name three rivers."))),
    Case("two speakers", (Turn("1", "Yes.", 1920), Turn("0", "No, thanks", 5000), Turn("1", "Good morning!"))),
)
BY_NAME = {case.name: case for case in CASES}


def recording(samples: int) -> np.ndarray:
    rng = np.random.default_rng(samples)
    t = np.arange(samples) / RATE
    tones = sum(np.sin(2 * np.pi * f * t + p) for f, p in rng.uniform((100, 0), (3000, 6), (5, 2)))
    return (0.1 * tones + 0.01 * rng.standard_normal(samples)).astype(np.float32)


def request_of(case: Case) -> Request:
    """Its last message is the user's, in the voice of the turn."""
    messages = []
    for turn in case.turns:
        parts: list[TextPart | MediaPart] = [TextPart(turn.text)]
        if turn.samples:
            samples = recording(turn.samples)
            parts.append(MediaPart("audio", samples.tobytes(), ArrayInfo("float32", samples.shape, RATE)))
        messages.append(Message(turn.speaker, parts))
    last = messages[-1]
    messages[-1] = Message("user", last.content)
    return Request(request_id=case.name, messages=messages, voice=case.turns[-1].speaker, modalities=["audio"])


# --- the library -----------------------------------------------------------------------------------------------------


@cache
def library_model(model_dir: Path) -> Any:
    return CsmForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()


@cache
def processed(model_dir: Path, case: Case) -> dict[str, Any]:
    """What the library's processor makes of a conversation. Not to be changed."""
    conversation = []
    for turn in case.turns:
        content: list[dict[str, Any]] = [{"type": "text", "text": turn.text}]
        if turn.samples:
            content.append({"type": "audio", "path": recording(turn.samples)})
        conversation.append({"role": turn.speaker, "content": content})
    processor = CsmProcessor.from_pretrained(model_dir)
    return dict(processor.apply_chat_template(conversation, tokenize=True, return_dict=True))


@cache
def expected(model_dir: Path, case: Case) -> tuple[list[list[int]], torch.Tensor]:
    """(rows of codes, waveform) of `generate`, greedy."""
    out = library_model(model_dir).generate(
        **processed(model_dir, case),
        do_sample=False,
        depth_decoder_do_sample=False,
        max_new_tokens=ROWS,
        output_audio=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0].tolist(), out.audio[0]


# --- the stages, driven as a worker drives them ----------------------------------------------------------------------


def sent(source: str, target: str, output: StageOutput) -> Payload:
    payload = TRANSFERS[source, target](stage_request(source, upstreams=set()), output)
    assert payload is not None
    return payload


@dataclass
class Spoken:
    """What came of one request."""

    rows: list[list[int]] = field(default_factory=list)
    """All rows of the backbone."""
    sent: list[list[int]] = field(default_factory=list)
    """The rows that left for the vocoder."""
    finish: str = ""
    cached: int = 0


@dataclass
class Stages:
    """The stages of one checkpoint."""

    input: InputProcessor
    encoder: Encoder
    backbone: Backbone

    @classmethod
    def of(cls, model_dir: Path) -> Stages:
        return cls(
            InputProcessor(context(model_dir, "input")),
            Encoder(context(model_dir, "encoder")),
            Backbone(context(model_dir, "backbone")),
        )

    def but(self, backbone: Backbone) -> Stages:
        return replace(self, backbone=backbone)


class Speech:
    """Requests through the stages, the backbone in its engine."""

    def __init__(self, stages: Stages, **config: Any) -> None:
        self.stages = stages
        self.engine = AutoregressiveEngine(stages.backbone, AutoregressiveConfig(**{"num_blocks": 400, **config}))

    def __call__(
        self,
        cases: list[Case],
        sampling: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        resume: dict[str, list[list[int]]] | None = None,
    ) -> dict[str, Spoken]:
        """`resume`: rows of each request that were made before."""
        spoken = {case.name: Spoken() for case in cases}
        requests = {case.name: self._add(case, sampling, seed, (resume or {}).get(case.name, [])) for case in cases}
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                one = spoken[output.request_id]
                one.rows += output.codes
                one.cached += output.cached_tokens
                if (codes := TRANSFERS["backbone", "vocoder"](requests[output.request_id], output)) is not None:
                    assert codes["start"] == len(one.sent)
                    one.sent += codes["codes"].tolist()
                if output.finished:
                    one.finish = output.finish_reason
        return spoken

    def _add(self, case: Case, sampling: SamplingParams, seed: int, resume: list[list[int]]) -> StageRequest:
        request = request_of(case)
        payload = self.stages.input.process(request)
        upstreams = {"input", "encoder"} if payload["media"] else {"input"}
        sampling = sampling.over(self.stages.backbone.default_sampling).over(FALLBACK)
        made = stage_request(
            "backbone",
            request_id=case.name,
            request=request,
            upstreams=upstreams,
            sampling=sampling,
            seed=seed,
            resume=resume,
        )
        self.engine.add(made)
        for chunk, final in self._encoded(payload) if payload["media"] else ():
            self.engine.feed(case.name, "encoder", chunk, final=final)
        facts = sent("input", "backbone", StageOutput(case.name, payload=payload, finished=True))
        self.engine.feed(case.name, "input", facts, final=True)
        return made

    def _encoded(self, payload: Payload) -> list[tuple[Payload, bool]]:
        """The encoder's chunks, one recording per call."""
        encoder, chunks = self.stages.encoder, []
        media = sent("input", "encoder", StageOutput("r", payload=payload, finished=True))
        for work in encoder.feed("r", "input", media, final=True):
            [result] = encoder.run([work])
            made = StageOutput("r", payload=result.payload, finished=work.last)
            chunks.append((sent("encoder", "backbone", made), work.last))
        return chunks
