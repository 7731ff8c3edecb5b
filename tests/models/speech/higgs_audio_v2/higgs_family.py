"""What the tests of this family share: texts, the library's answers, and the stages driven as a worker drives them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import StageRequest
from segue.messages.request import Message, Request, TextPart
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.shared.checkpoint.pretrained import errors_only
from segue.models.speech.higgs_audio_v2.input import SYSTEM, InputProcessor
from segue.models.speech.higgs_audio_v2.library import HiggsAudioV2ForConditionalGeneration
from segue.models.speech.higgs_audio_v2.llm import LLM
from segue.models.speech.higgs_audio_v2.loading import CODEC
from segue.models.speech.higgs_audio_v2.stages import TRANSFERS

# after the family, which mends torchvision
from segue.engines.autoregressive.config import AutoregressiveConfig  # isort: skip
from segue.engines.autoregressive.engine import AutoregressiveEngine  # isort: skip

ROWS = 120
GREEDY = SamplingParams(temperature=0.0, max_tokens=ROWS)


@dataclass(frozen=True)
class Case:
    name: str
    text: str
    scene: str = ""


CASES = (
    Case("words", "Hello there"),
    Case("in a hall", "Hello there", "A large hall with an echo."),
    Case("greeting", "Good morning!"),
    Case("sentence", "Nobody says <|eot_id|> aloud"),
    Case("rivers", "Name three rivers."),
)
BY_NAME = {case.name: case for case in CASES}


def context(model_dir: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(model_dir, stage, torch.device("cpu"), torch.float32, **more)


def stage_request(stage: str, **more: Any) -> StageRequest:
    return StageRequest(
        request_id=more.pop("request_id", "r"),
        stage=stage,
        request=more.pop("request", None) or Request(request_id="r"),
        sampling=more.pop("sampling", GREEDY),
        seed=more.pop("seed", 0),
        upstreams=frozenset({"input"}),
        downstreams=frozenset(),
        to_client=frozenset(),
        **more,
    )


def request_of(case: Case) -> Request:
    messages = [Message("scene", [TextPart(case.scene)])] if case.scene else []
    messages.append(Message("user", [TextPart(case.text)]))
    return Request(request_id=case.name, messages=messages, modalities=["audio"])


# --- the library -----------------------------------------------------------------------------------------------------


@cache
def library_model(model_dir: Path) -> Any:
    return HiggsAudioV2ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()


@cache
def library_codec(model_dir: Path) -> Any:
    """The whole codec of the library. Its module imports torchaudio, which only its encoder calls: an empty module
    stands for it where it is not installed. The tiny checkpoint has the codec's decoder only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchaudio", ModuleType("torchaudio"))
        module = import_module("transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer")
    with errors_only("transformers"):
        return module.HiggsAudioV2TokenizerModel.from_pretrained(model_dir / CODEC, dtype=torch.float32).eval()


def prompt_ids(model_dir: Path, case: Case) -> torch.Tensor:
    """[1, T] by the chat template. A mark within the text is text: it is put in after the template has run."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    conversation = [
        {"role": "system", "content": SYSTEM},
        *([{"role": "scene", "content": case.scene}] if case.scene else []),
        {"role": "user", "content": "@"},
    ]
    before, after = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True).split("@")
    begun = tokenizer(before.removesuffix("\n\n"), add_special_tokens=False)["input_ids"]
    text = tokenizer(f"\n\n{case.text}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return torch.tensor([[*begun, *text, *tokenizer(after, add_special_tokens=False)["input_ids"]]])


@cache
def expected(model_dir: Path, case: Case) -> list[list[int]]:
    """Rows of codes of `generate`, greedy, without the repetition rule, which draws again at random."""
    [rows] = library_model(model_dir).generate(
        input_ids=prompt_ids(model_dir, case), do_sample=False, ras_win_len=None, max_new_tokens=ROWS
    )
    return rows.tolist()


@torch.inference_mode()
def decoded(model_dir: Path, rows: list[list[int]]) -> torch.Tensor:
    """[t]: the waveform of rows of delayed codes, by the library's codec; as `HiggsAudioV2Processor.decode` has it."""
    codes = torch.tensor([row for row in rows[1:] if set(row) != {65}])
    groups = codes.shape[1]
    frames = len(codes) - groups + 1
    codes = torch.stack([codes[book : book + frames, book] for book in range(groups)]).clip(0, 63)
    return library_codec(model_dir).decode(codes[None]).audio_values[0, 0]


# --- the stages, driven as a worker drives them ----------------------------------------------------------------------


@dataclass
class Spoken:
    """What came of one request."""

    rows: list[list[int]] = field(default_factory=list)
    """All rows of the language model."""
    sent: list[list[int]] = field(default_factory=list)
    """The rows that left for the vocoder."""
    finish: str = ""
    cached: int = 0


class Speech:
    """Requests through the input stage and the language model in its engine."""

    def __init__(self, input: InputProcessor, llm: LLM, **config: Any) -> None:
        self.input, self.llm = input, llm
        self.engine = AutoregressiveEngine(llm, AutoregressiveConfig(**{"num_blocks": 400, **config}))

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
        sampling = sampling.over(self.llm.default_sampling).over(FALLBACK)
        requests = {}
        for case in cases:
            asked, known = request_of(case), (resume or {}).get(case.name, [])
            requests[case.name] = stage_request(
                "llm", request_id=case.name, request=asked, sampling=sampling, seed=seed, resume=known
            )
            self.engine.add(requests[case.name])
            self.engine.feed(case.name, "input", self.input.process(asked), final=True)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                one = spoken[output.request_id]
                one.rows += output.codes
                one.cached += output.cached_tokens
                if (codes := TRANSFERS["llm", "vocoder"](requests[output.request_id], output)) is not None:
                    assert codes["start"] == len(one.sent)
                    one.sent += codes["codes"].tolist()
                if output.finished:
                    one.finish = output.finish_reason
        return spoken
