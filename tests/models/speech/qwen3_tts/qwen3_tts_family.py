"""What the tests of this family share: what the package `qwen-tts` made of the tiny checkpoints, and the stages driven
as a worker drives them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import StageOutput, StageRequest
from segue.messages.request import Appended, Message, Request, TextPart
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.speech.qwen3_tts.input import InputProcessor
from segue.models.speech.qwen3_tts.stages import TRANSFERS
from segue.models.speech.qwen3_tts.talker import Talker
from segue.models.speech.qwen3_tts.vocoder import Vocoder

GOLDEN = Path(__file__).parent / "golden"
EVERY = 7
WEIGHTS = ("model.safetensors", "speech_tokenizer/model.safetensors")
RECIPE = "run tests/models/speech/qwen3_tts/golden/make_golden.py again"


@dataclass(frozen=True)
class Case:
    """One call of the package, and what it gave."""

    name: str
    kind: str
    max_tokens: int
    request: Request
    codes: list[list[int]]
    samples: torch.Tensor
    """Every `EVERY`th one."""
    arriving: bool = False
    """Of the package's form for a text that is not there yet."""


def _request(name: str, given: dict[str, str]) -> Request:
    names = {"instruct": "instructions", "language": "language"}
    return Request(
        request_id=name,
        messages=[Message("user", [TextPart(given["text"])])],
        modalities=["audio"],
        voice=given.get("speaker"),
        options={own: given[theirs] for theirs, own in names.items() if theirs in given},
    )


@cache
def cases() -> dict[str, Case]:
    with safe_open(GOLDEN / "golden.safetensors", framework="pt") as file:
        return {
            one["name"]: Case(
                name=one["name"],
                kind=one["kind"],
                max_tokens=one["max_tokens"],
                request=_request(one["name"], one["given"]),
                codes=file.get_tensor(f"{one['name']}.codes").tolist(),
                samples=file.get_tensor(f"{one['name']}.samples"),
                arriving=one.get("arriving", False),
            )
            for one in json.loads((GOLDEN / "cases.json").read_text())
        }


def spoken_by(kind: str, *, arriving: bool = False) -> list[Case]:
    return [case for case in cases().values() if case.kind == kind and case.arriving is arriving]


def check_same_weights(directory: Path, kind: str) -> None:
    """The golden tensors are those of this checkpoint."""
    made = hashlib.sha256()
    for name in WEIGHTS:
        made.update((directory / name).read_bytes())
    with safe_open(GOLDEN / "golden.safetensors", framework="pt") as file:
        assert file.metadata()[f"checkpoint.{kind}"] == made.hexdigest(), f"another tiny checkpoint: {RECIPE}"


def context(model_dir: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(model_dir, stage, torch.device("cpu"), torch.float32, **more)


def stage_request(stage: str, request: Request | None = None, **more: Any) -> StageRequest:
    request = request or Request(request_id="r")
    return StageRequest(
        request_id=more.pop("request_id", request.request_id),
        stage=stage,
        request=request,
        sampling=more.pop("sampling", SamplingParams(temperature=0.0)),
        seed=0,
        upstreams=frozenset({"talker" if stage == "vocoder" else "input"}),
        downstreams=frozenset() if stage == "vocoder" else frozenset({"vocoder"}),
        to_client=frozenset(),
        **more,
    )


@dataclass
class Spoken:
    """What came of one request."""

    codes: list[list[int]] = field(default_factory=list)
    """The rows that left for the vocoder."""
    talked: list[list[int]] = field(default_factory=list)
    """All rows of the talker."""
    finish: str = ""
    cached: int = 0


class Speech:
    """Input stage and talker, the latter in its engine."""

    def __init__(self, model_dir: Path, talker: Talker, **config: Any) -> None:
        self.input = InputProcessor(context(model_dir, "input"))
        self.engine = AutoregressiveEngine(talker, AutoregressiveConfig(**{"num_blocks": 400, **config}))
        self._talker = talker

    def __call__(
        self, asked: Sequence[Case], resume: dict[str, list[list[int]]] | None = None, **sampling: Any
    ) -> dict[str, Spoken]:
        """`resume`: rows of each request that the talker had made before."""
        spoken = {case.name: Spoken() for case in asked}
        for case in asked:
            self._add(case, (resume or {}).get(case.name, []), sampling)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                self._take(output, spoken[output.request_id])
        return spoken

    def _add(self, case: Case, resume: list[list[int]], sampling: dict[str, Any]) -> None:
        own = SamplingParams(**{"temperature": 0.0, "max_tokens": case.max_tokens, **sampling})
        whole = own.over(self._talker.default_sampling).over(FALLBACK)
        self.engine.add(stage_request("talker", case.request, sampling=whole, resume=resume))
        made = StageOutput(case.name, payload=self.input.process(case.request), finished=True)
        payload = TRANSFERS["input", "talker"](stage_request("input", case.request), made)
        assert payload is not None
        self.engine.feed(case.name, "input", payload, final=True)

    def arriving(self, case: Case, pieces: Sequence[str], resume: list[list[int]] | None = None) -> tuple[Spoken, int]:
        """A text in pieces, each given when the talker waits for more. Returns what came of it, and how often the
        talker waited."""
        text = msgspec.structs.replace(case.request, open=True, messages=_said(pieces[0]))
        sampling = SamplingParams(temperature=0.0, max_tokens=case.max_tokens)
        whole = sampling.over(self._talker.default_sampling).over(FALLBACK)
        self.engine.add(stage_request("talker", text, sampling=whole, resume=resume or []))
        state, works = self.input.begin(stage_request("input", text))
        for piece in pieces[1:]:
            works += self.input.feed(state, "client", {"piece": Appended(prompt=piece)}, final=False)
        works += self.input.feed(state, "client", {"piece": None}, final=True)
        spoken, waits = Spoken(), 0
        for work in works:
            [result] = self.input.run([work])
            if result.error is not None:
                raise result.error
            assert result.payload is not None
            if spoken.finish:
                break
            self.engine.feed(case.name, "input", result.payload, final=work.last)
            for _ in range(2 * case.max_tokens):
                before = len(spoken.talked)
                for output in self.engine.step():
                    if output.error is not None:
                        raise output.error
                    self._take(output, spoken)
                if spoken.finish or len(spoken.talked) == before:
                    waits += not spoken.finish
                    break
        return spoken, waits

    def _take(self, output: TokenOutput, spoken: Spoken) -> None:
        spoken.talked += output.codes
        spoken.cached += output.cached_tokens
        if (sent := TRANSFERS["talker", "vocoder"](stage_request("talker"), output)) is not None:
            spoken.codes += sent["codes"].tolist()
        if output.finished:
            spoken.finish = output.finish_reason


def _said(text: str) -> list[Message]:
    return [Message("user", [TextPart(text)])]


def wave_of(vocoder: Vocoder, codes: list[list[int]], split: Sequence[int] = ()) -> torch.Tensor:
    """The samples of an utterance; `split`: frames that arrive at once."""
    state, _ = vocoder.begin(stage_request("vocoder"))
    made: list[torch.Tensor] = []
    at = 0
    for size in (*split, len(codes)):
        rows, at = codes[at : at + size], at + size
        payload = {"codes": torch.tensor(rows, dtype=torch.long).reshape(len(rows), 4), "start": at - size}
        for work in vocoder.feed(state, "talker", payload, final=at >= len(codes)):
            [result] = vocoder.run([work])
            assert result.payload is not None
            made.append(result.payload["samples"])
        if at >= len(codes):
            break
    return torch.cat(made)
